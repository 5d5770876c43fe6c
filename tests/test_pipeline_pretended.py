"""Steps of pipelines in a pretended world: nothing is sent, and shapes, messages and what is measured are a rank's own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from pipeline_programs import begin, gpt, token_loss, tokens
from test_pipeline_marks import Net
from torch import nn

import onecard as oc
from onecard import fleet, pipeline
from onecard.testing import run_ranks


def layers(mode: str, steps: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Messages, actions and gradients of a pipeline of layers on this rank."""
    begin(mode, steps, 1, pp=oc.get_world_size())
    torch.manual_seed(0)
    model = fleet.distributed_model(fleet.PipelineLayer(gpt(5), loss_fn=token_loss))
    with oc.explain() as report:
        model.forward_backward_pipeline([*tokens(steps)])
    sent = [(m.operator, m.shape, m.step.bytes) for m in report.messages]
    runner = model._runner
    return sent, [span.action for span in runner.timeline().spans], [p.grad.shape for p in model.parameters()]


@pytest.mark.share(1)
@pytest.mark.parametrize("mode", ["1F1B", "ZBH1"])
def test_a_pretended_step_of_layers_is_a_real_one_but_for_values(mode: str) -> None:
    real = run_ranks(layers, 2, mode, 3)
    for rank in range(2):
        with oc.pretend(2, rank):
            sent, actions, grads = layers(mode, 3)
        assert (actions, grads) == real[rank][1:]
        assert sent == real[rank][0] and sent


def marked(mode: str) -> tuple[list[Any], list[Any]]:
    pair = [oc.ProcessMesh([i], ["pp"]) for i in range(2)]
    stages = pair * 2 if mode == "VPP" else pair
    torch.manual_seed(0)
    net = Net(stages, len(stages))
    runner = pipeline.MarkedRunner(net, nn.functional.mse_loss, stages=stages)
    with oc.explain() as report:
        runner.step(torch.ones(6, 6), torch.ones(6, 6), mode, 2)
    sent = [(m.operator, m.shape, m.step.bytes) for m in report.messages]
    return sent, [span.action for span in runner.timeline().spans]


@pytest.mark.share(1)
@pytest.mark.parametrize("mode", ["ZBH1", "VPP"])
def test_a_pretended_step_by_marks_is_a_real_one_but_for_values(mode: str) -> None:
    real = run_ranks(marked, 2, mode)
    for rank in range(2):
        with oc.pretend(2, rank):
            assert marked(mode) == real[rank] and real[rank][0]
        with oc.pretend(2, rank, fake=True):
            assert marked(mode) == real[rank]


def test_a_step_that_fails_leaves_no_microbatch_waiting() -> None:
    """With several stages on a mesh microbatches wait in threads of their own: an error ends them all."""
    with oc.pretend(2):
        stages = [oc.ProcessMesh([i], ["pp"]) for i in range(2)] * 2
        net, calls = Net(stages, len(stages)), [0]

        def fails(module: nn.Module, args: Any) -> None:
            calls[0] += 1
            if calls[0] == 2:
                raise KeyError("in the second microbatch")

        net.register_forward_pre_hook(fails)
        before = threading.active_count()
        with pytest.raises(KeyError):
            pipeline.step_by_marks(net, nn.functional.mse_loss, torch.ones(6, 6), torch.ones(6, 6), "VPP", 2, stages)
        assert calls == [2] and threading.active_count() == before
