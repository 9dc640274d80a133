"""Steps whose gradients are not finite: kept out on the device, told later, and nothing waits between two logs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from tests.launch import run_ranks
from tests.runs import tiny_argv
from torchtitan.config import load_config
from torchtitan.distributed.gradients import local_part
from torchtitan.distributed.world import World
from torchtitan.optim.groups import plan_optimizer
from torchtitan.resilience.finite import FiniteGuard, NonFiniteError
from torchtitan.resilience.guard import StopRequest
from torchtitan.resolve.job import resolve_job
from torchtitan.trainer import Trainer

WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal")
"""What the host asks a device for, and waits for."""
SAVES = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"]
EIGHT_BITS = [
    "--model.args={dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=301, multiple_of=64}",
    "--optimizer.name=AdamW8bit",
    "--optimizer.block_size=32",
]


def deferring(argv: list[str], world: World) -> Trainer:
    """A trainer that does on the host what it does on an accelerator."""
    trainer = Trainer(resolve_job(load_config(argv), world.size), world)
    trainer.finite = FiniteGuard(trainer.optimizer, deferred=True)
    return trainer


def waits_here(event: Any) -> bool:
    """Whether it waits: of the fused kernels only those of the host read the number of steps there."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::_fused_adam"):
            return False
        parent = parent.cpu_parent
    return event.name in WAITS


def waits(world: World, argv: list[str], steps: int) -> Counter[str]:
    """What of it happens between two logs, in three steps after the first."""
    trainer = deferring(argv, world)
    found: Counter[str] = Counter()
    for number, batches in zip(range(steps), trainer.loader, strict=False):
        valid = float(sum(batch.num_valid() for batch in batches))
        with profile() as recorded:
            trainer.train_step(batches, valid)
        if number:
            found.update(event.name for event in recorded.function_events or () if waits_here(event))
    trainer.finite.check()
    trainer.close()
    return found


def poisoned(world: World, argv: list[str], at: int) -> tuple[str, bool, int, list[int]]:
    """A NaN in one rank's gradient at one step: the error, whether weights and states are those from before, the step
    that the run stands at, and those that were done all the same."""
    trainer = deferring(argv, world)
    Path(trainer.job.config.job.dump_folder).mkdir(parents=True, exist_ok=True)
    before: list[Tensor] = []
    done: list[int] = []
    forward_backward = trainer.runner.forward_backward

    def everything() -> list[Tensor]:
        states = [value for p in trainer.parameters for value in trainer.optimizer.state[p].values()]
        return [local_part(tensor).detach() for tensor in (*trainer.parameters, *states)]

    def poison(batch: Any, num_valid: float) -> Tensor:
        loss = forward_backward(batch, num_valid)
        done.append(trainer.state.step + 1)
        if done[-1] == at:
            before[:] = [tensor.clone() for tensor in everything()]
            if world.rank == world.size - 1:
                local_part(trainer.parameters[0].grad).view(-1)[0] = float("nan")  # type: ignore[arg-type]
        return loss

    trainer.runner.forward_backward = poison  # type: ignore[method-assign]
    try:
        trainer.run(StopRequest())
    except NonFiniteError as error:
        same = all(torch.equal(now, old) for now, old in zip(everything(), before, strict=True))
        return str(error), same, trainer.state.step, done
    raise AssertionError("the poisoned step went through")


def both(world: World, folder: Path, words: list[str]) -> tuple[Counter[str], tuple[str, bool, int, list[int]]]:
    found = waits(world, tiny_argv(folder, *words, run=f"waits-{world.rank}"), 4)
    argv = tiny_argv(folder, *words, *SAVES, "--checkpoint.interval=5", "--metrics.log_freq=100")
    return found, poisoned(world, argv, 3)


@pytest.mark.parametrize("words", [[], EIGHT_BITS], ids=["AdamW", "AdamW8bit"])
def test_nothing_waits_and_nothing_of_a_step_that_is_not_finite_is_done(tmp_path: Path, words: list[str]) -> None:
    for waited, (error, unchanged, step, done) in run_ranks(both, 2, tmp_path, words):
        assert not waited
        assert error == "the gradient norm of step 3 is nan; the weights are those of the step before"
        assert unchanged and step == 2
        assert done == [1, 2, 3, 4, 5]  # before step 5 is saved, it is looked at
    assert not list((tmp_path / "run" / "checkpoint").glob("step-*"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]


def test_the_count_sees_what_waits(tmp_path: Path) -> None:
    """As an optimizer does that cannot withhold a step: its norm is looked at each time."""
    found = run_ranks(waits, 1, tiny_argv(tmp_path, "--optimizer.name=SGD"), 4)[0]
    assert found["aten::is_nonzero"] >= 3


def guarded(*groups: dict[str, Any], name: str = "AdamW") -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    torch.manual_seed(0)
    own = {"a": torch.nn.Parameter(torch.randn(3)), "b": torch.nn.Parameter(torch.randn(2))}
    return plan_optimizer(name, {}, lr=0.1, weight_decay_exclude=[], groups=groups).build(own.items()), own["a"]


@pytest.mark.parametrize("groups", [(), ({"pattern": "b", "name": "Adam"},)])
def test_the_first_step_is_told(groups: tuple[dict[str, Any], ...]) -> None:
    optimizer, weight = guarded(*groups)
    guard = FiniteGuard(optimizer, deferred=True)
    guard.check()
    for step, norm in enumerate([1.0, float("inf"), 2.0, float("nan")], start=7):
        before = weight.detach().clone()
        weight.grad = torch.ones(3)
        guard.admit(step, torch.tensor(norm))
        optimizer.step()
        assert torch.equal(weight, before) == (step > 7)
    with pytest.raises(NonFiniteError, match="norm of step 8 is inf") as error:
        guard.check()
    assert error.value.step == 8


@pytest.mark.parametrize(
    ("name", "groups"), [("SGD", ()), ("AdamW", ({"pattern": "b", "name": "SGD"},))], ids=["alone", "beside AdamW"]
)
def test_what_cannot_withhold_a_step_is_told_at_once(name: str, groups: tuple[dict[str, Any], ...]) -> None:
    optimizer, _ = guarded(*groups, name=name)
    guard = FiniteGuard(optimizer, deferred=True)
    with pytest.raises(NonFiniteError, match="norm of step 3 is nan"):
        guard.admit(3, torch.tensor(float("nan")))


def test_torchs_own_say_that_they_can() -> None:
    """By a name of theirs that is not public: where it goes, every step would be waited for."""
    optimizer, _ = guarded()
    assert optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
