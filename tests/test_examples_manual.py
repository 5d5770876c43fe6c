"""The manual programs of the seeds against their one-card twins, and the tables that seed 000 prints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_examples_seeds import SMALL_003, TABLES, assert_losses, load, train_003, train_003_on_this_rank

from onecard.testing import run_ranks


def both_programs_of_000() -> list[Any]:
    program = load("manual_model_parallel_000")
    return [program.train_model(name) for name in TABLES]


def test_the_tables_of_seed_000_by_hand(capfd: pytest.CaptureFixture[str]) -> None:
    for found in run_ranks(both_programs_of_000, 2):
        for (mp_losses, single_losses), (name, expected) in zip(found, TABLES.items(), strict=True):
            table = pytest.approx(expected, rel=1e-5, abs=1e-6 if name == "dynamic" else 0)
            assert mp_losses == table and single_losses == table
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[rank 0] mp_loss: ")]
    assert len(lines) == 10 and all("single_loss: " in line for line in lines)


@pytest.mark.share(1)
@pytest.mark.parametrize("name", ["manual_model_parallel_003", "manual_pipeline_parallel_003"])
def test_seed_003_by_hand(name: str) -> None:
    expected = train_003("single_card_003", SMALL_003)
    assert_losses(run_ranks(train_003_on_this_rank, 2, name, SMALL_003), expected)


def demos_of_004(folder: str) -> dict[str, float]:
    program = load("manual_demos_004")
    return {name: program.largest_error(*pair) for name, pair in program.demo(folder).items()}


def test_demos_of_seed_004(tmp_path) -> None:
    for errors in run_ranks(demos_of_004, 4, str(tmp_path)):
        assert list(errors) == ["mlp", "self_attention"] and max(errors.values()) < 1e-5
    assert len(list(tmp_path.glob("*.safetensors"))) == 8


WAYS = [{}, {"how": "alltoall"}, {"how": "never-gathered"}, {"how": "never-gathered", "margin": True}]
# As many samples as a rank has classes: sampling itself, with the numbers of no sampling.
WAYS += [{"how": "never-gathered", "samples": 5}]


def classifier_of_001(ways: list[dict[str, Any]]) -> list[list[float]]:
    program = load("manual_classifier_001")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(48, 1, 28, 28, generator=generator)
    data = images, torch.randint(10, (48,), generator=generator)
    return [program.train_model(program.Args(**way, epochs=3, batch_size=12), data)[0] for way in ways]


def test_the_classifier_of_seed_001() -> None:
    plain, margin = classifier_of_001([WAYS[0], WAYS[3]])
    assert len(set(plain)) == 12 and plain != margin
    for found in run_ranks(classifier_of_001, 2, WAYS):
        for way, losses in zip(WAYS, found, strict=True):
            assert losses == pytest.approx(margin if way.get("margin") else plain, rel=1e-5), way


def fewer_samples() -> list[list[int]]:
    from onecard import fleet

    fleet.init()
    group = load("manual_classifier_001").oc.new_group()
    labels = torch.tensor([7, 3, 3, 9])
    numbers, kept = fleet.meta_parallel.class_center_sample(labels, 5, 3, group)
    return [numbers.tolist(), kept.tolist()]


def test_classes_that_are_sampled_hold_the_labels() -> None:
    (numbers, first), (same, second) = run_ranks(fewer_samples, 2)
    assert numbers == same and len(first) == len(second) == 3 and 3 in first and {7 - 5, 9 - 5} <= set(second)
    kept = [*first, *(5 + c for c in second)]
    assert [kept[n] for n in numbers] == [7, 3, 3, 9]


def learn_digits() -> tuple[list[float], float]:
    program = load("manual_classifier_001")
    return program.train_model(program.Args(how="alltoall", epochs=3, lr=0.003))


@pytest.mark.proof
def test_seed_001_reads_digits() -> None:
    pytest.importorskip("sklearn", reason="pip install scikit-learn")
    for losses, accuracy in run_ranks(learn_digits, 2):
        assert losses[-1] < 0.5 and accuracy > 0.95
