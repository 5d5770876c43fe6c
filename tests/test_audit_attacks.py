"""Files that are damaged: each ends in an audit or in one line, never in a traceback. YAML is read as PyYAML reads it."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from onecard.errors import PlanError
from onecard.planning.audit.audit import Audit, Given
from onecard.planning.audit.read import read
from onecard.planning.audit.report import as_json, page
from onecard.planning.audit.shell import script
from onecard.planning.audit.shell_values import Values
from onecard.planning.audit.yaml_text import read_yaml

DATA = Path(__file__).parent / "data" / "audit"
FILES = sorted(path for path in DATA.iterdir() if path.suffix in (".sh", ".slurm", ".toml", ".yaml", ".json"))
PIECES = [
    "", "\"", "'", "{", "}", "[", "]", "(", ")", "$", "${", "$((", "`", "\\", "\n", "#", "=", ":", ",", "-1", "0", "8", "'8'",
    "null", "true", "1e400", "nan", "99999999999999999999", "\u2028", "\xe9", "\t", "\x00", "--", "source gpt3_175b.sh", "if",
    "fi", "|", "&&", ";;", "case x in", "<<EOT", "auto", "3.5", "*", "&a", "{{", "[[", "- ", "\r", "9" * 50,
]  # fmt: skip


def damaged(text: str, draw: random.Random) -> str:
    """A text with one to three places changed."""
    for _ in range(draw.randint(1, 3)):
        kind, at = draw.randrange(7), draw.randrange(len(text) + 1)
        if kind == 0:
            text = text[:at] + draw.choice(PIECES) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + draw.randint(1, 20) :]
        elif kind == 2:
            numbers = [*re.finditer(r"\d+", text)]
            if numbers:
                found = draw.choice(numbers)
                text = (
                    text[: found.start()]
                    + draw.choice(["0", "-1", "7", "1e3", "x", "'8'", "9" * 30, ""])
                    + text[found.end() :]
                )
        elif kind == 3:
            lines = text.split("\n")
            i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]
            text = "\n".join(lines)
        elif kind == 4:
            lines = text.split("\n")
            text = "\n".join(lines + [draw.choice(lines)])
        elif kind == 5:
            text = text[:at]
        else:
            words = [*re.finditer(r"[A-Za-z_]{3,}", text)]
            if words:
                a, b = draw.choice(words), draw.choice(words)
                text = text[: a.start()] + b[0] + text[a.end() :]
    return text


@pytest.mark.parametrize("kind", [".sh .slurm", ".toml", ".yaml", ".json"])
def test_damaged_files_end_in_an_audit_or_in_one_line(kind: str, tmp_path: Path) -> None:
    draw = random.Random(kind)
    files = [path for path in FILES if path.suffix in kind.split()]
    texts = {path: path.read_text() for path in files}
    for path in FILES:
        (tmp_path / path.name).write_text(path.read_text())
    ends = {"audit": 0, "error": 0}
    for _ in range(500):
        path = draw.choice(files)
        place = tmp_path / path.name
        place.write_text(damaged(texts[path], draw), newline="")
        beside = [tmp_path / "llama3_8b.json"] if path.suffix != ".json" and path.suffix in (".yaml", ".toml") else []
        if path.suffix == ".json" and draw.random() < 0.5:
            beside = [tmp_path / draw.choice(["llama3_8b.json", "bloom_ds.json"])]
        try:
            found = read([place, *(b for b in beside if b != place)], Given(world=draw.choice([None, 8, 128])))
        except PlanError as error:
            assert str(error).isprintable() or "\n" not in str(error), str(error)
            assert len(str(error)) < 2000 and str(error).startswith(str(tmp_path)), str(error)
            ends["error"] += 1
        else:
            assert isinstance(found, Audit) and page(found, True) and as_json(found)
            ends["audit"] += 1
        place.write_text(texts[path])
    assert min(ends.values()) > 25, ends


def test_bytes_at_random_are_no_files(tmp_path: Path) -> None:
    draw = random.Random(1)
    for i in range(200):
        place = tmp_path / f"a{draw.choice(['.sh', '.toml', '.yaml', '.json', ''])}"
        place.write_bytes(bytes(draw.choices(range(256 if i % 2 else 128), k=draw.randint(0, 60))))
        with pytest.raises(PlanError):
            read([place])


def with_words_as_keys(value: Any) -> Any:
    """What PyYAML reads, with keys as they are written: names of settings are texts."""
    if isinstance(value, dict):
        return {
            str(key).lower() if isinstance(key, bool) else str(key): with_words_as_keys(v) for key, v in value.items()
        }
    return [with_words_as_keys(v) for v in value] if isinstance(value, list) else value


YAML = [
    "a: 1\nb: 'x: y'\nc: \"q\\\"#\" # c\nd: no\ne: 'no'\nf:\ng: ~\nh: 1.5\ni: -3\nj: 1e3\nk: 1.e+3\nl: x # y\nm: x#y\n",
    "a:\n  b:\n    c: 1\n  d: [1, 'x, y', [2, {a: b}], true]\ne: {a: 1, 'b c': [x]}\n",
    "a:\n- 1\n- b: 2\n  c: 3\n-\n  d: 4\n- - 5\n  - 6\nz: []\n",
    "---\na: Yes\nb: OFF\nc: yEs\nd: 0x\ne: 1_000\nf: .5\ng: +1\nh: http://x:1/y\ni: a b  c\n...\n",
    "", "x", "'x'", "[1, 2]", "{}", "- a\n- b: c\n", "a: ''\nb: \"\"\n", "'a b': 1\n\"c\": 2\n",
    "a: it's\nb: -x\nc: x-\nd: a,b\n",
]  # fmt: skip


@pytest.mark.parametrize("text", YAML)
def test_yaml_means_what_it_means_to_pyyaml(text: str) -> None:
    yaml = pytest.importorskip("yaml")
    assert read_yaml(text, "a.yaml").value == yaml.safe_load(text)


def test_yaml_by_chance_means_what_it_means_to_pyyaml() -> None:
    """Written by PyYAML in the block style; and of damaged texts, whatever is read is read alike."""
    yaml = pytest.importorskip("yaml")
    draw = random.Random(2)

    def value(depth: int) -> Any:
        kind = draw.randrange(9 if depth else 6)
        if kind < 6:
            words = ["a", "no", "x y", "1", "", "a: b", "#", "é"]
            return [draw.randint(-99, 99), draw.choice([True, False, None]), draw.choice(words),
                    round(draw.uniform(-9, 9), 3), "b_1", []][kind]  # fmt: skip
        if kind == 6:
            return [value(depth - 1) for _ in range(draw.randint(0, 3))]
        return {f"k{i}": value(depth - 1) for i in range(draw.randint(0, 3))}

    same = 0
    for _ in range(300):
        whole = {f"key{i}": value(3) for i in range(3)}
        text = yaml.safe_dump(
            whole, width=10**6, default_flow_style=draw.choice([False, False, None]), allow_unicode=True
        )
        assert read_yaml(text, "a").value == whole, text
        broken = damaged(text, draw)
        try:
            mine = read_yaml(broken, "a").value
        except PlanError:
            continue
        same += 1
        try:
            theirs = yaml.safe_load(broken)
        except yaml.YAMLError:
            continue  # it is stricter here and there
        assert repr(mine) == repr(with_words_as_keys(theirs)), broken
    assert same > 30


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=1; run $A ${A} \"$A b\" '$A' ${B:-2} ${A:-3} ${A:+4}", ["1", "1", "1 b", "$A", "2", "1", "4"]),
        ("A='x y'; run $A \"$A\"", ["x", "y", "x y"]),
        (
            "A=(1 'b c'); A+=(3); run ${A[@]} \"${A[@]}\" ${#A[@]} ${A[1]} $A",
            ["1", "b", "c", "3", "1", "b c", "3", "3", "b", "c", "1"],
        ),
        ("A=4; run $((A*2+1)) $(( $A / 3 )) $((-A)) $((7%4))", ["9", "1", "-4", "3"]),
        ("A=1; A+=2; run a$A'b'\"c\"", ["a12bc"]),
        ("run a \\\n  b # c\n", ["a", "b"]),
        ("if [ 1 -lt 2 ] && [[ a == a* ]]; then run yes; else run no; fi", ["yes"]),
        ("if [[ x = y ]] || [ -z '' ]; then run yes; else run no; fi", ["yes"]),
        ("if [ x = y ]; then run 1; elif [ 2 -ge 2 ]; then run 2; else run 3; fi", ["2"]),
        ("case abc in x|y) run 1;; a*) run 2;; *) run 3;; esac", ["2"]),
        ("f() { run 1; }; run 2", ["2"]),
        ("for i in 1 2; do run $i; done; run 3", ["3"]),
        ("cat <<E\nrun 1\nE\nrun 2", ["2"]),
        ("[ -n '' ] && run 1; [ -n x ] && run 2", ["2"]),
        ("export A=5 B=6; run $A$B", ["56"]),
        ("run a > out 2>&1 | tee log", ["a"]),
    ],
)
def test_words_of_a_shell(text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(text)
    commands = [c for c in script(tmp_path / "a.sh", {}).commands if c and c[0].text == "run"]
    assert [argument.text for command in commands for argument in command[1:]] == words


def test_what_a_shell_does_not_know_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("A=$B; C=$(hostname); run $A ${D%x} $C $((E + 1)) $1")
    (command,) = script(tmp_path / "a.sh", {}).commands
    assert [argument.text.count("\0") for argument in command] == [0, 2, 2, 2, 2, 2]
    assert Values("x", {"A": "1"}).joined("${A}$A", 1) == "11"
    known = script(tmp_path / "a.sh", {"B": "7", "E": "1"}).commands[0]
    assert [known[1].text, known[4].text] == ["7", "2"]
