"""The process that writes a rank's checkpoints from memory that it shares with the rank; see ``background.py``.

It ends when the rank does, and minds no signal: what is asked of a job is the rank's to answer.
"""

import ctypes
import os
import signal
import sys
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any


def main() -> None:
    """Answer requests until the other end is closed."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent_death_signal = 1  # PR_SET_PDEATHSIG: a rank that starts again must not meet a file still being written
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL, 0, 0, 0)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))

    import torch
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan

    from torchtitan.checkpoint.background import LOWER_PRIORITY, Layout, attempt
    from torchtitan.checkpoint.dcp.writer import Written, write_share
    from torchtitan.checkpoint.places import place

    def write(plan: SavePlan, folder: str) -> Written:
        return write_share(place(folder, key="checkpoint.folder"), plan, lambda item: tensors[item.index])

    torch.set_num_threads(1)
    os.nice(LOWER_PRIORITY)
    tensors: dict[MetadataIndex, Tensor] = {}
    while True:
        try:
            new_memory, plan, folder = connection.recv()
            if new_memory:
                memory = recv_handle(connection)
                tensors = Layout.of(plan).tensors(memory)
                os.close(memory)
        except (EOFError, ConnectionError):
            return
        connection.send(attempt(partial(write, plan, folder)))
