"""How many bytes a forward pass leaves for the backward pass, as torch's profiler counts allocations."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from torchtitan.config.schema import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_activation_checkpoint
from torchtitan.models.spec import MODELS
from torchtitan.resolve.model import resolve_args

VOCABULARY, SEQ_LEN = 64, 256
MODES = {
    "none": ActivationCheckpoint(),
    "every 3rd": ActivationCheckpoint(mode="selective", selective_ac_option="3"),
    "every 2nd": ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    "per op": ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    "full": ActivationCheckpoint(mode="full"),
}
"""From that which keeps most to that which keeps least."""


def build(keys: ActivationCheckpoint, *, layers: int = 8, family: str = "llama3") -> nn.Module:
    """A model of ``layers`` whose blocks keep what ``keys`` say."""
    spec = MODELS.get(family)
    sizes = {"dim": 64, "n_layers": layers, "n_heads": 4, "vocab_size": VOCABULARY}
    model = spec.cls(resolve_args(spec, "debugmodel", sizes))
    apply_activation_checkpoint(model, spec.layout, keys, [str(layer) for layer in range(layers)])
    return model


def kept_bytes(model: nn.Module) -> int:
    """What is allocated when a forward pass of a row of ``SEQ_LEN`` tokens begins is taken from what is at its end."""
    tokens, positions = torch.randint(VOCABULARY, (1, SEQ_LEN)), torch.arange(SEQ_LEN)[None]
    model(tokens, positions)  # what is allocated once is by now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        loss = model(tokens, positions).sum()
    kept = sum(event.self_cpu_memory_usage for event in profiled.key_averages())
    loss.backward()
    return int(kept)
