"""Programs for one card on several ranks, not one line changed; and the plan applied in place."""

from __future__ import annotations

import gc
import io
import os
import re
import sys
import warnings
import weakref
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amounts import PROOF
from auto_habits import HABITS
from auto_programs import CLASSIFIER, LANGUAGE, REFUSED
from launching import python
from torch import nn

import onecard as oc
from onecard.auto.entrance import Entrance
from onecard.auto.rank import Job, begin, watching
from onecard.commands.find import find
from onecard.commands.run import main
from onecard.errors import PlanError
from onecard.launch._options import Target
from onecard.testing import RankError, run_ranks

LAUNCH = ["-m", "onecard", "run", "--auto"]


def ran(folder: Path, *words: Any) -> str:
    """What a program prints, in a folder of its own."""
    done = python(folder, *words, OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    assert done.returncode == 0, done.stdout + done.stderr
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith("onecard run --auto: "))


def files(folder: Path) -> dict[str, Any]:
    """All that is in a folder but logs of the launcher: texts, and what torch has saved."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not name.startswith(("logs", "program")):
            found[name] = torch.load(path) if path.suffix == ".pt" else path.read_text()
    return found


def assert_alike(one: Any, other: Any) -> None:
    """Checkpoints: the same structure, plain tensors, values as near as sums in another order are."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=2e-5)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_alike(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_alike(a, b)
    else:
        assert one == other or one == pytest.approx(other, rel=1e-5)


def _in_process(plan: dict[str, Any], folder: Path, *words: str) -> str:
    os.chdir(folder)
    sys.argv[1:] = words
    begin(Job(oc.Plan(per_host=0, **plan)).to_json())
    text, out = (folder / "program.py").read_text(), io.StringIO()
    with redirect_stdout(out):
        exec(compile(text, str(folder / "program.py"), "exec"), names := {"__name__": "__main__"})
    for value in names.values():  # a rank of a test ends without Python's own end
        if isinstance(value, io.IOBase):
            value.close()
    return out.getvalue()


def several(folder: Path, plan: dict[str, Any], *words: str) -> str:
    """What rank 0 prints under a plan; the others print the same."""
    said = run_ranks(_in_process, oc.Plan(**plan).world, plan, folder, *words, timeout=120.0)
    assert len({*said}) == 1
    return said[0].rstrip("\n")


def folders(tmp_path: Path, text: str, *names: str) -> list[Path]:
    """A folder for each run, with the program."""
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "program.py").write_text(text)
    return [tmp_path / name for name in names]


@pytest.mark.proof
@pytest.mark.parametrize(
    "plan", [{"dp": 2, "zero": 1}, *([{"dp": 4, "zero": 3}, {"pp": 2, "dp": 2}] if PROOF else [])], ids=str
)
def test_a_classifier_with_checkpoints_and_resume(tmp_path, plan):
    one, other = folders(tmp_path, CLASSIFIER, "one", "several")
    wanted = [ran(one, "program.py"), ran(one, "program.py", "--epochs", 3, "--resume")]
    found = [ran(other, *LAUNCH, "--nproc_per_node", oc.Plan(**plan).world, "program.py")]
    found.append(several(other, plan, "--epochs", "3", "--resume"))
    assert found == wanted
    assert set(files(one)) == {"out/last.pt", "out/log.csv", "out/best.json"}
    assert_alike(files(one), files(other))


COLUMNS = (("*.up.*", "tp: Shard(0)"), ("*.down.weight", "tp: Shard(1)"), ("wte.weight", "tp: Shard(0)"))
SUMS = (("*.down", "tp: Shard(1)"),)
LANGUAGE_PLANS = [
    {"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2, "placements": COLUMNS, "outputs": SUMS}, {"dp": 2, "zero": 1, "recompute": "full"},
    {"dp": 2, "tp": 2, "zero": 2, "placements": COLUMNS}, {"pp": 2}, {"pp": 2, "dp": 2, "zero": 1, "recompute": "full"},
]  # fmt: skip


@pytest.fixture(scope="module")
def language_on_one_card(tmp_path_factory) -> tuple[str, dict[str, Any]]:
    """What it prints, and the files that it leaves: the same for all plans."""
    (folder,) = folders(tmp_path_factory.mktemp("language"), LANGUAGE, "one")
    return ran(folder, "program.py"), files(folder)


@pytest.mark.proof
@pytest.mark.share(2)
@pytest.mark.parametrize("plan", LANGUAGE_PLANS, ids=str)
def test_a_language_model(tmp_path, plan, language_on_one_card):
    said, left = language_on_one_card
    (folder,) = folders(tmp_path, LANGUAGE, "several")
    assert several(folder, plan) == said
    assert_alike(left, files(folder))


@pytest.mark.proof
def test_dropout_is_that_of_one_rank(tmp_path):
    """Distributed tensors draw onecard's numbers: of one rank the same."""
    folders(tmp_path, LANGUAGE, "run")
    said = [several(tmp_path / "run", {"dp": n}, "--dropout") for n in (1, 2)]
    assert said[0] == said[1] and "step 7" in said[0]


def _refused(name: str, folder: Path) -> None:
    program = folder / "program.py"
    begin(Job(oc.Plan(dp=2, per_host=0), {"weight": [2, 2], "bias": [2]}).to_json())
    exec(compile(program.read_text(), str(program), "exec"), {"__name__": "__main__"})


@pytest.mark.share(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_said_with_its_line(tmp_path, name):
    text, words = REFUSED[name]
    (tmp_path / "program.py").write_text(text)
    with pytest.raises(RankError, match=r"(?s)AutoError: .*" + words):
        run_ranks(_refused, 2, name, tmp_path, timeout=60.0)


def _all_habits(plan: dict[str, Any] | None) -> dict[str, str]:
    """What each habit prints, one after the other in one process."""
    if plan is not None:
        begin(Job(oc.Plan(per_host=0, **plan)).to_json())
    said = {}
    for name, text in HABITS.items():
        with redirect_stdout(io.StringIO()) as out:
            exec(compile(text, f"{name}.py", "exec"), {"__name__": "__main__"})
        said[name] = out.getvalue()
    return said


@pytest.mark.proof
@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 1}, *([{"dp": 2}, {"dp": 2, "zero": 3}] if PROOF else [])], ids=str)
def test_habits(plan):
    wanted = run_ranks(_all_habits, 1, None, timeout=100.0)[0]
    for found in run_ranks(_all_habits, 2, plan, timeout=100.0):
        assert found == wanted


def _adversaries(ranks: bool) -> str:
    if (
        ranks
    ):  # a plan is made of what comes ahead of the first optimizer's step: here of the discriminator, which runs second
        critic = {"0.weight": [8, 2], "0.bias": [8], "2.weight": [1, 8], "2.bias": [1]}
        begin(Job(oc.Plan(dp=2, zero=1, per_host=0), critic).to_json())
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(HABITS["gan"], "gan.py", "exec"), {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.proof
def test_a_model_that_runs_ahead_of_the_plans():
    (wanted,) = run_ranks(_adversaries, 1, False)
    assert run_ranks(_adversaries, 2, True) == [wanted] * 2


SPECTRAL = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    loss = net(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.5f}")
"""


@pytest.mark.proof
def test_a_weight_that_is_parametrized_is_no_model(tmp_path):
    """It is read ahead of the model; a plan's placements are of the model."""
    (tmp_path / "program.py").write_text(SPECTRAL)
    plan = {"tp": 2, "placements": (("2.weight", "tp: Shard(0)"),)}
    assert several(tmp_path, plan) == ran(tmp_path, "program.py")


def _let_go() -> list[bool]:
    """Whether an optimizer and a module that a program has replaced are let go, and count as laid out no longer."""
    begin(Job(oc.Plan(dp=2, per_host=0)).to_json())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    head, optimizers = weakref.ref(model[1]), []
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        optimizers.append(weakref.ref(optimizer))
        model[1] = nn.Linear(2, 1)
    gc.collect()
    numbers = {id(x) for x in watching.here._done}
    return [optimizers[0]() is None, head() is None, numbers <= {id(x) for x in gc.get_objects()}]


def test_what_is_laid_out_is_not_known_by_its_number():
    """Else a new optimizer with the number of a module that is gone counts as laid out, on a rank where it has this number."""
    assert run_ranks(_let_go, 2) == [[True] * 3] * 2


def _printed() -> list[Any]:
    begin(Job(oc.Plan(dp=2, per_host=0), seed=3).to_json())
    model = nn.Linear(2, 1)
    loss = model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum()
    loss.backward()
    drawn = [torch.rand(1).item(), __import__("numpy").random.default_rng().random(), __import__("random").random()]
    seen = [repr(loss), repr(model.bias), repr((model.weight * torch.full((40, 2), 0.123)).flatten())]
    return [repr(loss.detach()), f"{loss:.3f}", str(model.weight.grad), torch.distributed.is_initialized(), drawn, seen]


def test_what_is_seen_is_one_card():
    first, second = run_ranks(_printed, 2)
    assert first == second
    assert re.fullmatch(r"tensor\(-?[\d.]+\)", first[0]) and first[2] == "tensor([[4., 6.]])" and first[3] is False
    loss, bias, long = first[5]
    assert re.fullmatch(r"tensor\(-?[\d.]+, grad_fn=<SumBackward0>\)", loss)
    assert re.fullmatch(r"Parameter containing:\ntensor\(\[-?[\d.]+\], requires_grad=True\)", bias)
    assert long.endswith("],\n       grad_fn=<ViewBackward0>)") and max(map(len, long.splitlines())) <= 80


class _Named(nn.Linear):
    def forward(self, *, x: Any, twice: bool = False) -> Any:
        self.seen = [type(x), twice, *getattr(x, "placements", ())]
        return super().forward(x) * (1 + twice)


def _by_name() -> list[Any]:
    begin(Job(oc.Plan(dp=2, per_host=0)).to_json())
    model = _Named(2, 1)
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x=torch.ones(4, 2), twice=True).sum().backward()
            optimizer.step()
            seen.append(model.seen)
    return [seen, model.weight.grad.tolist(), [str(w.message) for w in told]]


def test_the_first_batch_is_divided_also_where_it_is_given_by_name():
    """As a model of transformers is called: a first step of the whole batch on each rank takes the memory of one card."""
    rows = [oc.DistTensor, True, oc.Shard(0)]
    assert run_ranks(_by_name, 2) == [[[rows] * 2, [[16.0, 16.0]], []]] * 2


# -- in place --------------------------------------------------------------------------------------------------------------


def _trained(plan: dict[str, Any] | None) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    params, seen = list(model.parameters()), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    params[-1].register_hook(lambda grad: seen.append(float(grad.sum())))
    params[-1].note = "kept"
    batches = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (8, 8, 3, 2, 8)]
    if plan is not None:
        assert oc.parallelize(model, optimizer, plan=oc.Plan(**plan))[0] is model
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        seen += [loss.item(), norm.item()]
    with torch.no_grad():
        seen.append(float(average(batches[0][0]).sum()))
    return seen, params[-1] is model[3].bias and params[-1].note == "kept"


def _heard(plan: dict[str, Any] | None) -> list[float]:
    """What hooks read that were registered before the parameters took their places; every second one halves."""
    torch.manual_seed(0)
    model, heard = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), list[float]()

    def hear(p: torch.Tensor) -> None:
        heard.append(float(p.grad.norm()))
        if p.ndim == 2:
            p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if plan is not None:
        oc.parallelize(model, optimizer, plan=oc.Plan(**plan))
    for i in range(6):
        F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return sorted(heard)


@pytest.mark.share(1)
@pytest.mark.parametrize("zero", [2, 0, 1, 3])
def test_hooks_after_gradients_read_what_one_card_would(zero):
    wanted = _heard(None)
    for found in run_ranks(_heard, 2, {"dp": 2, "zero": zero}):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-7) and len(found) == 24


MIDDLE = (("0.weight", "tp: Shard(0)"), ("1.*", "tp: Shard(0)"), ("3.weight", "tp: Shard(1)"))
PLANS = [
    {"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}, {"tp": 2, "placements": MIDDLE},
    {"dp": 2, "tp": 2, "zero": 1, "placements": MIDDLE}, {"dp": 4, "zero": 3, "replicas": 2}, {"pp": 2},
    {"pp": 2, "dp": 2, "zero": 3}, {"pp": 2, "dp": 2},
    {"pp": 2, "tp": 2, "placements": MIDDLE},
]  # fmt: skip


@pytest.mark.share(1)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_in_place(plan):
    wanted, _ = _trained(None)
    ranks = oc.Plan(**plan).world
    for found, same in run_ranks(_trained, ranks, plan):
        assert same
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"dp": 2}, "the plan is for 2 ranks, and there are 1"),
        ({"placements": (("blocks.*.up", "tp: Shard(0)"),)}, r"name 'blocks.\*.up', and Linear has no such parameter"),
        ({"recompute": "full"}, "has no list of blocks"),
        ({"recompute": "selective"}, "recompute='selective'"),
        ({"microbatches": 4}, r"microbatches=4: .*oc.to_static"),
        ({"sequence_parallel": True}, "sequence_parallel=True"),
        ({"offload": True}, "offload=True"),
    ],
    ids=str,
)
def test_what_cannot_be_applied(plan, words):
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match=words):
        oc.parallelize(model, plan=oc.Plan(**plan))
    assert not isinstance(model.weight, oc.DistTensor)


def test_a_parameter_that_a_graph_holds():
    model = nn.Linear(2, 2)
    loss = model(torch.ones(1, 2)).sum()
    oc.parallelize(model, plan=oc.Plan())
    with pytest.raises(RuntimeError, match="by a graph that was made before it"):  # not a gradient that goes nowhere
        loss.backward()
    other = nn.Linear(2, 2)
    known = weakref.ref(other.weight)
    with pytest.raises(PlanError, match="weight: a graph of autograd, or a weak reference"):
        oc.parallelize(other, plan=oc.Plan())
    assert known() is other.weight


# -- which plan ------------------------------------------------------------------------------------------------------------


class _Wide(nn.Module):
    """Few rows, wide layers: what a rank does with all rows is cheaper than sums of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 2048), nn.Linear(2048, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _searched(ranks: int) -> tuple[list[float], str]:
    torch.manual_seed(3)
    model = _Wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader([(torch.randn(64), torch.randn(64)) for _ in range(24)], 6, shuffle=True)
    if ranks > 1:
        oc.parallelize(model, optimizer, loader, "auto", loss=nn.MSELoss(), machine=oc.Machine.preset("A100"))
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, str(getattr(model.up.weight, "placements", ""))


def test_as_many_blocks_are_computed_again_as_the_plan_says():
    """All of them stay in the model, in which more than three are alike."""
    for some, ran in ((0, 12), (2, 8)):
        model = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(6))))
        seen: list[int] = []
        for i, block in enumerate(model[0]):
            block[0].register_forward_pre_hook(lambda *_, i=i, seen=seen: seen.append(i))
        plan = oc.Plan(recompute="full", recompute_blocks=some, parameters="float32", compute="float32")
        oc.parallelize(model, plan=plan)
        model(torch.randn(3, 4)).sum().backward()
        assert len(model[0]) == 6 and len(seen) == ran


@pytest.mark.proof
def test_parallelize_finds_a_plan_for_the_loaders_batches():
    """The first batch is looked at; the order of the next ones and all random numbers are as if nobody had."""
    wanted, _ = _searched(1)
    for found, placements in run_ranks(_searched, 2, 2, timeout=120.0):
        assert found == pytest.approx(wanted, rel=1e-5) and placements == "(Shard(dim=0),)"
    with pytest.raises(PlanError, match="give a loader too"):
        oc.parallelize(_Wide())


def test_a_plan_file_for_the_launcher(tmp_path, capsys):
    (tmp_path / "program.py").write_text(LANGUAGE)
    ran(tmp_path, *LAUNCH, "--dry_run", "plan.json", "--nproc_per_node", 2, "program.py")
    job = Job.read(str(tmp_path / "plan.json"))
    assert job.plan.world == 2 and job.program["wte.weight"] == [28, 16]
    assert not (tmp_path / "ckpt.pt").exists()
    assert main(["--auto", str(tmp_path / "plan.json"), "--nproc_per_node", "3", str(tmp_path / "program.py")]) == 2
    assert "the plan is for 2 ranks, and there are 3" in capsys.readouterr().err


@pytest.mark.proof
def test_a_script_that_copies_its_model_is_priced(tmp_path):
    """An average is a deep copy: made without data, it can still be computed with."""
    (tmp_path / "program.py").write_text(CLASSIFIER)
    done = python(tmp_path, *LAUNCH, "--dry_run", "--nproc_per_node", "2", "program.py")
    assert done.returncode == 0 and "the fastest of" in done.stderr and "no price is known" not in done.stderr


def test_help_says_what_auto_is(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--nproc" in said and "--auto [plan.json]" in said and "not one line changed" in said


def test_words_of_one_card_only():
    assert main(["--memory", "x", "--auto", "train.py"]) == 2
    assert main(["--dry_run", "--nproc_per_node", "2", "train.py"]) == 2
    assert main(["--auto", "--nproc_per_node", "2", "missing_program.py"]) == 2


@pytest.mark.parametrize(
    ("signal", "words"), [("SIGKILL", r" \(as a system does that runs out of memory\);"), ("SIGUSR1", ";")]
)
def test_a_search_that_is_ended_says_by_what(tmp_path, signal, words):
    program = tmp_path / "program.py"
    program.write_text(f"import os, signal\nos.kill(os.getpid(), signal.{signal})\n")
    with pytest.raises(PlanError, match=f"ended by {signal}{words}"):
        find(Target(str(program), False, ()), 2, "A100", 0.0)


def test_the_first_tensor_says_which_have_rows():
    """Others give the same numbers, but each rank would compute the whole batch."""
    with oc.pretend(world_size=2, rank=1):
        entrance = Entrance(oc.ProcessMesh([0, 1], ["dp"]), ("dp",))
        (x, table, few), named = entrance.handed_in((torch.ones(5, 2), torch.ones(3, 2), 4), {"y": torch.ones(5)}).found
        assert (x.to_local().shape, named["y"].to_local().shape) == ((2, 2), (2,))
        assert type(table) is torch.Tensor and few == 4
        assert entrance.handed_in((torch.ones(1, 2),), {}) is None  # fewer rows than ranks
