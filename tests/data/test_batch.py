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
