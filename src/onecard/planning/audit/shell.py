"""The commands of a shell script, expanded: assignments, arrays, conditions that can be told, files that are sourced.

Nothing is run. What depends on the machine (command substitutions, files, the environment) is not known: a condition on it is
passed over, a value of it keeps its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from onecard.errors import PlanError
from onecard.planning.audit.settings import shown
from onecard.planning.audit.shell_values import Values
from onecard.planning.audit.shell_words import Statement, Word, statements
from onecard.planning.json_text import text_of

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARE = ("export", "declare", "local", "readonly", "typeset", "set")
_LOOPS = ("for", "while", "until", "select")
_SLURM = re.compile(r"#SBATCH\s+(?:--nodes|-N)[= ]\s*(\d+)")
DEEPEST = 16


@dataclass(frozen=True)
class Argument:
    """A word of a command, and where it was written."""

    text: str
    where: str


@dataclass
class ShellScript:
    """What a script says.

    Attributes:
        commands: each as its words.
        passed: what was passed over, with its place: loops, conditions that are not known, files that are not there.
    """

    commands: list[list[Argument]] = field(default_factory=list)
    passed: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class _Frame:
    """An if, a loop, a case or a function that is open."""

    kind: str
    active: bool
    done: bool = False
    subject: str = ""
    expects: bool = False
    where: str = ""


def script(path: Path, define: Mapping[str, str]) -> ShellScript:
    """Reads a script.

    Args:
        define: variables that the environment gives.

    Raises:
        PlanError: what is not closed, a circle of sourced files.
    """
    made = ShellScript()
    text = text_of(path)
    nodes = _SLURM.search(text)
    slurm = {"SLURM_NNODES": nodes[1], "SLURM_JOB_NUM_NODES": nodes[1]} if nodes else {}
    _Reader(made, Values(str(path), {**slurm, **define}), define).file(path, text, ())
    return made


class _Reader:
    def __init__(self, made: ShellScript, values: Values, define: Mapping[str, str]) -> None:
        self.made, self.values, self.define = made, values, define
        self.frames: list[_Frame] = []
        self.origin: dict[str, list[str]] = {}  # where the words of a variable were written

    def file(self, path: Path, text: str, above: tuple[Path, ...]) -> None:
        name = str(path)
        if "\0" in text:
            raise PlanError(f"{name}: is no text: it has a zero byte")
        outer, self.frames = self.frames, []
        skip = False
        for statement in _whole_tests(statements(text, name)):
            if skip:
                skip = statement.end in ("&&", "||")
                continue
            result = self.statement(statement, path, above)
            skip = (statement.end == "&&" and result is False) or (statement.end == "||" and result is not False)
        if self.frames:
            frame = self.frames[-1]
            raise PlanError(f"{frame.where}: {frame.kind} is not closed; write {_ENDS[frame.kind]} at its end")
        self.frames = outer

    @property
    def active(self) -> bool:
        return all(frame.active for frame in self.frames)

    def statement(self, statement: Statement, path: Path, above: tuple[Path, ...]) -> bool | None:
        """Does one; False where it is a condition that does not hold."""
        words = statement.words
        while words:
            first, where = words[0].text, f"{path}:{words[0].line}"
            frame = self.frames[-1] if self.frames else None
            if frame is not None and frame.kind == "case" and frame.expects:
                self.pattern(frame, words, statement.end)
                return None
            if first in ("then", "else", "do", "{"):
                if first == "else" and frame is not None and frame.kind == "if":
                    frame.active, frame.done = not frame.done, True
                if first == "{" and not (frame is not None and frame.kind == "function" and frame.expects):
                    self.frames.append(_Frame("{", True, where=where))
                elif frame is not None:
                    frame.expects = False
                words = words[1:]
                continue
            if first in ("fi", "done", "esac", "}"):
                if frame is None or _ENDS[frame.kind] != first:
                    raise PlanError(f"{where}: {first} closes nothing that is open")
                self.frames.pop()
                words = words[1:]
                continue
            return self.rest(first, words, statement.end, path, above)
        if statement.end == ";;" and self.frames and self.frames[-1].kind == "case":
            self.frames[-1].active, self.frames[-1].expects = False, True
        return None

    def rest(self, first: str, words: list[Word], end: str, path: Path, above: tuple[Path, ...]) -> bool | None:
        """A statement behind its keywords."""
        where = f"{path}:{words[0].line}"
        frame = self.frames[-1] if self.frames else None
        result: bool | None = None
        if first in ("if", "elif"):
            self.branch(first, frame, words[1:], where)
        elif first in _LOOPS:
            self.open(_Frame("loop", False, where=where), f"{first} ... done")
        elif first == "case":
            known = self.values.joined(words[1].text, words[1].line) if len(words) > 1 and self.active else ""
            self.frames.append(_Frame("case", False, subject=known, expects=True, where=where))
            if words[3:]:
                self.pattern(self.frames[-1], words[3:], end)
            return None
        elif first == "function" or (end == "(" and len(words) == 1 and re.fullmatch(r"[\w-]+", first)):
            self.frames.append(_Frame("function", False, expects=True, where=where))
            if words[-1].text == "{":
                self.frames[-1].expects = False
        elif self.active:
            result = self.act(first, words, path, above)
        if end == ";;" and self.frames and self.frames[-1].kind == "case":
            self.frames[-1].active, self.frames[-1].expects = False, True
        return result

    def open(self, frame: _Frame, what: str) -> None:
        if self.active:
            self.made.passed.append((what, frame.where))
        self.frames.append(frame)

    def branch(self, first: str, frame: _Frame | None, words: list[Word], where: str) -> None:
        holds = self.condition(words) if self.active or first == "elif" else False
        if first == "if":
            if holds is None and self.active:
                self.made.passed.append((f"if {' '.join(word.text for word in words)}", where))
            self.frames.append(_Frame("if", bool(holds), bool(holds), where=where))
        elif frame is None or frame.kind != "if":
            raise PlanError(f"{where}: elif without an if")
        else:
            frame.active = bool(holds) and not frame.done
            frame.done = frame.done or bool(holds)

    def pattern(self, frame: _Frame, words: list[Word], end: str) -> None:
        """Of a case."""
        if words and words[0].text == "esac":
            self.frames.pop()
            return
        subject = frame.subject
        if not frame.done and "\0" not in subject:
            matches = any(fnmatchcase(subject, self.values.joined(word.text, word.line)) for word in words)
            frame.active = frame.active or matches
        if end == ")":
            frame.expects, frame.done = False, frame.done or frame.active

    def act(self, first: str, words: list[Word], path: Path, above: tuple[Path, ...]) -> bool | None:
        """An assignment, a test, a sourced file, or a command."""
        if first in ("[", "[[", "test"):
            return self.condition(words)
        if first in _DECLARE:
            words = [word for word in words[1:] if _ASSIGNMENT.match(word.text)]
        if all(_ASSIGNMENT.match(word.text) for word in words):
            for word in words:
                self.assign(word, path)
        elif first in ("source", "."):
            self.source(words, path, (*above, path))
        else:
            self.made.commands.append([argument for word in words for argument in self.arguments(word, path)])
        return None

    def assign(self, word: Word, path: Path) -> None:
        found = _ASSIGNMENT.match(word.text)
        assert found is not None  # the caller has looked
        name, add = found[1], bool(found[2])
        if name in self.define:
            return
        where = f"{path}:{word.line}"
        if word.items is not None:
            arguments = [argument for item in word.items for argument in self.arguments(item, path)]
            before = self.origin.get(name, []) if add else []
            self.origin[name] = before + [argument.where for argument in arguments]
            self.values.assign(name, [argument.text for argument in arguments], add, True)
        else:
            self.values.assign(name, [self.values.joined(found[3], word.line)], add, False)
            self.origin[name] = [where]

    def arguments(self, word: Word, path: Path) -> list[Argument]:
        """The words that a word becomes; those of an array keep the lines on which they were written."""
        texts = self.values.fields(word.text, word.line)
        found = re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', word.text)
        origin = self.origin.get(found[1], []) if found else []
        here = f"{path}:{word.line}"
        if not word.text.startswith('"') and found:  # not quoted: words of the array are split once more
            whole = self.values.known.get(found[1], [])
            origin = [place for text, place in zip(whole, origin, strict=False) for _ in text.split()]
        if len(origin) != len(texts):
            origin = [here] * len(texts)
        return [Argument(text, place) for text, place in zip(texts, origin, strict=True)]

    def source(self, words: list[Word], path: Path, above: tuple[Path, ...]) -> None:
        where = f"{path}:{words[0].line}"
        name = self.values.joined(words[1].text, words[1].line) if len(words) > 1 else ""
        place = path.parent / name
        if not name or "\0" in name or len(name) > 4000 or not place.is_file():
            self.made.passed.append((f"source {shown(name)}", where))
            return
        if place.resolve() in {file.resolve() for file in above}:
            round_ = " -> ".join(str(file) for file in (*above, place))
            raise PlanError(f"{where}: source {name} leads back to itself ({round_}); take one of them out")
        if len(above) > DEEPEST:
            raise PlanError(f"{where}: files source each other more than {DEEPEST} deep")
        self.file(place, text_of(place), above)

    def condition(self, words: list[Word]) -> bool | None:
        """Whether a test holds; None if that is not known."""
        result: bool | None = None
        join, begin = "", 0
        for i in range(len(words) + 1):
            if i < len(words) and words[i].text not in ("&&", "||"):
                continue
            one = self.test(words[begin:i], within=bool(join))
            if not join:
                result = one
            elif join == "&&":
                result = False if False in (result, one) else None if None in (result, one) else True
            else:
                result = True if True in (result, one) else None if None in (result, one) else False
            join, begin = (words[i].text if i < len(words) else ""), i + 1
        return result

    def test(self, words: list[Word], within: bool) -> bool | None:
        """One test, without && and ||."""
        texts = [word.text for word in words]
        if not within and texts[:1] not in (["["], ["[["], ["test"], ["!"], ["true"], ["false"]):
            return None
        texts = [text for text in texts if text not in ("[", "[[", "]", "]]", "test")]
        negated = texts[:1] == ["!"]
        texts = texts[1:] if negated else texts
        if texts in (["true"], ["false"]):
            return (texts == ["true"]) != negated
        holds = _holds([self.values.joined(text, words[0].line) for text in texts])
        return holds if holds is None else holds != negated


def _whole_tests(found: list[Statement]) -> list[Statement]:
    """Conditions with && and || as one statement each, in which those are words."""
    made: list[Statement] = []
    for statement in found:
        last = made[-1] if made else None
        first = last.words[0].text if last is not None and last.words else ""
        closed = last is not None and last.words and last.words[-1].text in ("]", "]]")
        if (
            last is not None
            and last.end in ("&&", "||")
            and (first in ("if", "elif") or (first in ("[", "[[") and not closed))
        ):
            last.words += [Word(last.end, last.words[-1].line), *statement.words]
            last.end = statement.end
        else:
            made.append(statement)
    return made


_ENDS = {"if": "fi", "loop": "done", "case": "esac", "function": "}", "{": "}"}
_COMPARE = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}


def _holds(values: list[str]) -> bool | None:
    if any("\0" in value for value in values):
        return None
    if len(values) == 2 and values[0] in ("-z", "-n"):
        return (values[1] == "") == (values[0] == "-z")
    if len(values) == 1:
        return values[0] != ""
    if len(values) != 3:
        return None
    left, sign, right = values
    if sign in ("=", "=="):
        return fnmatchcase(left, right)
    if sign == "!=":
        return not fnmatchcase(left, right)
    if sign in _COMPARE and all(re.fullmatch(r"-?\d{1,18}", side) for side in (left, right)):
        a, b = int(left), int(right)
        return {"==": a == b, "!=": a != b, ">": a > b, "<": a < b, ">=": a >= b, "<=": a <= b}[_COMPARE[sign]]
    return None
