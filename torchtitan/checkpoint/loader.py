"""Finds where a run goes on or starts from, and loads it.

Nothing is saved here; see ``checkpointer.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from upath import UPath

from torchtitan.checkpoint.dcp.reader import Reader
from torchtitan.checkpoint.manifest import MANIFEST, Manifest, NewerFormat, Numbers, damage
from torchtitan.checkpoint.places import share
from torchtitan.checkpoint.storage import StepFolders, check_start, find_step, steps_since
from torchtitan.checkpoint.tensors import Tensors
from torchtitan.checkpoint.titan import TitanStep
from torchtitan.config.schema import Checkpoint
from torchtitan.distributed.world import World
from torchtitan.errors import CheckpointError, ConfigError, one_line
from torchtitan.log import logger


@dataclass
class Start:
    """How a run began: the step of its own folder that it goes on from, the parts that were not loaded although there
    was a step, the step that it went back to by number, and the step of TorchTitan's that it took over."""

    step: int | None = None
    anew: set[str] = field(default_factory=set)
    went_back_to: int | None = None
    titan: TitanStep | None = None


class Loader:
    """Loads ``tensors`` and ``numbers`` from ``folders`` or elsewhere, as the keys of ``[checkpoint]`` say.

    ``optimizers`` are their names by parameter; ``read_huggingface`` fills weights from a folder. Called by all ranks
    together.
    """

    def __init__(
        self,
        folders: StepFolders,
        world: World,
        *,
        tensors: Tensors,
        numbers: Mapping[str, Numbers],
        optimizers: Mapping[str, str],
        read_huggingface: Callable[[str, Mapping[str, Tensor]], None],
        keys: Checkpoint,
    ) -> None:
        self._folders = folders
        self._world = world
        self._tensors = tensors
        self._numbers = numbers
        self._optimizers = optimizers
        self._read_huggingface = read_huggingface
        self._keys = keys

    def load(self) -> Start:
        """Go on from this run's newest good step (or the one asked for), else from ``checkpoint.initial_load_path``,
        else from nothing.

        Damaged steps are named and passed over unless asked for by number, which is a CheckpointError.
        """
        keys = self._keys
        self._tidy()
        start = Start()
        steps = self._steps_to_try(start)
        for step in reversed(steps):
            folder = self._folders.path(step)
            problem = self._damage(folder, step)
            if problem is None:
                self._resume(step, folder, start)
                return start
            if step == keys.load_step:
                raise CheckpointError(f"{problem}; take another checkpoint.load_step, or -1 for the newest good one")
            logger.warning(f"{problem}; trying the step before it")
        if steps:
            raise CheckpointError(f"every step in {self._folders.root} is damaged; move the folder away to start anew")
        if keys.initial_load_path is not None and keys.initial_load_in_hf:
            logger.info(f"starting from the Hugging Face model in {keys.initial_load_path}")
            self._read_huggingface(keys.initial_load_path, self._tensors.weights)
            self._tensors.equalize_twins()
        elif keys.initial_load_path is not None:
            self._start_from(find_step(keys.initial_load_path), start)
        return start

    def _tidy(self) -> None:
        """Mend what was interrupted, on rank 0; a CheckpointError of all ranks if that cannot be done."""
        problem = None
        if self._world.rank == 0 and not self._keys.load_only:
            try:
                self._folders.recover()
            except OSError as error:
                problem = f"{self._folders.root} cannot be put in order: {one_line(error)}"
        if found := self._world.first(problem):
            raise CheckpointError(found)

    def _steps_to_try(self, start: Start) -> list[int]:
        steps, load_step = self._folders.steps(), self._keys.load_step
        for step in self._folders.incomplete():
            logger.warning(f"{self._folders.path(step)} is not complete (no {MANIFEST}); it is passed over")
        check_start(self._folders, load_step)
        if load_step < 0:
            return steps
        if later := steps_since(self._folders, load_step):
            logger.info(f"this run has gone back to step {load_step} already and goes on from there")
            return later
        start.went_back_to = load_step
        return [load_step]

    def _resume(self, step: int, folder: UPath, start: Start) -> None:
        self._restore(folder, start)
        start.step = 0 if "train_state" in start.anew else step
        later = self._folders.set_aside_after(start.step) if self._world.rank == 0 and not self._keys.load_only else []
        if later:
            logger.warning(f"going back to step {start.step}: later steps {later} are renamed to step-N.superseded")
        self._world.barrier()
        logger.info(f"going on after step {start.step} from {folder}")

    def _start_from(self, folder: UPath, start: Start) -> None:
        model_only = self._keys.initial_load_model_only
        ours = (folder / MANIFEST).exists()
        if ours and (problem := self._damage(folder)):
            raise CheckpointError(problem)
        logger.info(f"starting from {'the weights' if model_only else 'everything'} in {folder}")
        if ours and not model_only:
            self._restore(folder, start)
        elif model_only:
            self._read(folder, {*self._keys.exclude_from_loading, "optimizer"})
        else:
            self._take_over(folder, start)

    def _take_over(self, folder: UPath, start: Start) -> None:
        """Go on from a step that TorchTitan wrote; what follows from its number is the trainer's to work out."""
        start.anew = set(self._keys.exclude_from_loading)
        start.titan = titan = TitanStep(Reader(folder))
        if "optimizer" not in start.anew:
            titan.check_optimizer(self._optimizers)
            for line in titan.differences(self._tensors.hyperparameters()) if self._world.rank == 0 else ():
                logger.warning(line)
        self._read(folder, start.anew)

    def _restore(self, folder: UPath, start: Start) -> None:
        manifest = Manifest.read(folder)
        began = manifest.state.get("start", {})
        if start.went_back_to is None:
            start.went_back_to = began.get("went_back_to")
        excluded: set[str] = set(self._keys.exclude_from_loading)
        # A part that the same command excluded before has started anew already.
        start.anew = excluded - set(began.get("excluded", ()))
        for name, part in self._numbers.items():
            if name not in start.anew:
                try:
                    part.load_state_dict(manifest.state[name])
                except ConfigError:
                    if name not in excluded:
                        raise
                    start.anew.add(name)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise CheckpointError(f"{folder / MANIFEST} holds no usable {name}: {error!r}") from error
        self._read(folder, start.anew)
        if start.anew:
            logger.info(f"not loaded (checkpoint.exclude_from_loading): {', '.join(sorted(start.anew))}")

    def _read(self, folder: UPath, without: set[str]) -> None:
        self._tensors.read(Reader(folder), model="model" not in without, optimizer="optimizer" not in without)

    def _damage(self, folder: UPath, step: int | None = None) -> str | None:
        """What is wrong with a step, of that number if one is given, agreed on by all ranks; each reads its share of
        the files."""

        def look() -> str | None:
            try:
                manifest = Manifest.read(folder)
            except NewerFormat:  # the step before it would be an older state of the run
                raise
            except CheckpointError as error:
                return str(error)
            if step not in (None, manifest.step):  # from where the run would fall back to that number again and again
                return f"{folder} was renamed: what it holds is step {manifest.step}"
            return damage(folder, manifest, share(list(manifest.files), self._world.rank, self._world.size))

        return self._world.first(look())
