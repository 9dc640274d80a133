"""The numbers of each logged step as a table that spreadsheets open."""

import csv
from typing import Annotated

from pydantic import Field

from torchtitan.observe.sinks import SINKS, Record, RunFiles, Sink


class Table:
    def __init__(self, run: RunFiles, columns: list[str]) -> None:
        self.columns = columns
        self.file = (run.folder / "metrics.csv").open("a" if run.resumed_step else "w", newline="")
        self.writer = csv.writer(self.file)
        if not run.resumed_step:
            self.writer.writerow(columns)

    def write(self, record: Record) -> None:
        self.writer.writerow([record[name] for name in self.columns])

    def close(self) -> None:
        self.file.close()


@SINKS.register("csv")
def table(
    run: RunFiles,
    *,
    columns: Annotated[list[str], Field(min_length=1, description="names as in metrics.jsonl")] = ["step", "loss"],  # noqa: B006
) -> Sink:
    """metrics.csv in the run's folder."""
    return Table(run, columns)
