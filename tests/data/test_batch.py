import torch

from torchtitan.data.batch import IGNORE_INDEX, Batch


def test_ignored_labels_do_not_count() -> None:
    labels = torch.tensor([[1, IGNORE_INDEX, 0], [IGNORE_INDEX, IGNORE_INDEX, 2]])
    batch = Batch(torch.zeros_like(labels), labels, torch.zeros_like(labels))
    assert batch.num_valid() == 3


def test_to_moves_all_three() -> None:
    ones = torch.ones(2, 3, dtype=torch.int64)
    moved = Batch(ones, ones, ones).to("meta")
    assert {moved.tokens.device.type, moved.labels.device.type, moved.positions.device.type} == {"meta"}


class OnHost:
    """Stands in for a tensor, which without a GPU cannot be pinned."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned

    def is_pinned(self) -> bool:
        return self.pinned

    def pin_memory(self) -> "OnHost":
        return OnHost(True)

    def to(self, device: str, *, non_blocking: bool) -> tuple[str, bool, bool]:
        return device, self.pinned, non_blocking


def test_no_copy_to_a_gpu_waits() -> None:
    batch = Batch(OnHost(True), OnHost(False), OnHost(False))  # type: ignore[arg-type]
    assert batch.to("cuda:1") == Batch(*[("cuda:1", True, True)] * 3)  # type: ignore[arg-type]
    assert batch.to("cpu").labels == ("cpu", False, True)  # type: ignore[comparison-overlap]
