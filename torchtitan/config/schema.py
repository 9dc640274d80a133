"""Every key of the configuration: type, default, bounds and a line of meaning.

How values get here is in load.py, what no two keys may say together in together.py. Options of registered parts are
not listed here: their signatures declare them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, Field, PrivateAttr

from torchtitan.config.options import Option, option_from_field
from torchtitan.config.section import FolderText, OpenSection, PathText, Section, key
from torchtitan.errors import UNKNOWN

Dtype = Literal["float32", "bfloat16"]
ScheduleName = Literal[
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
Auto = Literal[-1] | Annotated[int, Field(ge=1, le=2**24)]
"""A count that is worked out from the rest where it is -1."""


class Job(Section):
    """The run as a whole"""

    config_file: str | None = key(None, "the TOML file to read; only on the command line")
    dump_folder: FolderText = key("./outputs", "folder of everything the run writes")
    description: str = key("default job", "free text for the log")
    print_config: bool = key(False, "log the resolved configuration at the start")
    imports: list[str] = key([], "modules to import that register parts")
    max_duration_minutes: float | None = key(None, "stop, with a save, after this long", gt=0)


class Metrics(Section):
    """What is reported, how often and where to"""

    log_freq: int = key(10, "steps between two reports; the first step always reports", ge=1)
    enable_tensorboard: bool = key(False, "write TensorBoard files")
    enable_wandb: bool = key(False, "report to Weights & Biases; its WANDB_ variables say where")
    save_tb_folder: str = key("tb", "their folder in job.dump_folder")
    disable_color_printing: bool = key(False, "no colors in the log")
    peak_tflops: float | None = key(None, "peak of one device that mfu divides by; none: known or measured", gt=0)
    sinks: list[str] = key([], "further registered sinks that get every report")
    sink_args: dict[str, Any] = key({}, "options of a sink, in the table of its name")


class Model(Section):
    """What is trained"""

    name: str = key("llama3", "family of models")
    flavor: str = key("debugmodel", "size within the family")
    hf_assets_path: PathText = key(
        "", "file of the tokenizer, or the folder that holds it; empty: the small tokenizer of the debug model"
    )
    args: dict[str, Any] = key({}, "hyper-parameters in place of the flavor's, such as n_layers")
    converters: list[str] = key(
        [], "rewrites of the model, in this order; the options of each in the table of its name"
    )
    print_after_conversion: bool = key(False, "log the modules after the converters")


class Tokenizer(OpenSection):
    """How text becomes ids"""

    name: str = key("hf", "kind of tokenizer")


class Optimizer(OpenSection):
    """How gradients become updates"""

    name: str = key("AdamW", "optimizer")
    lr: float = key(8e-4, "peak learning rate", gt=0)
    weight_decay_exclude: list[str] = key([], "patterns of parameter names without weight decay, such as *norm.weight")
    groups: list[dict[str, Any]] = key([], "tables of parameters with a rate, options or an optimizer of their own")


class LRScheduler(OpenSection):
    """The learning rate over the steps"""

    name: str = key("warmup_stable_decay", "shape of the curve")
    total_steps: int | None = key(None, "steps of the whole curve; none: training.steps", ge=1)


class Loss(OpenSection):
    """What is minimised"""

    name: str = key("cross_entropy", "loss, summed over the valid tokens and divided by their number")
    chunks: int = key(
        1, "pieces along the tokens in which head and loss are computed, so that all logits never exist at once", ge=1
    )


class Trainer(OpenSection):
    """What a step is"""

    name: str = key("default", "trainer; default: one update by the gradients of the batch")


class DataLoader(Section):
    """The processes that prepare batches"""

    num_workers: int = key(0, "processes on each rank; 0: the training process itself", ge=0)
    pin_memory: bool = key(False, "hand batches over in page-locked memory")
    prefetch_factor: int | None = key(None, "batches each worker prepares ahead", ge=1)


class Training(Section):
    """The data, the steps and their precision"""

    dataset: str = key("python_docs", "kind of data set")
    dataset_path: PathText | None = key(None, "its file, folder or glob")
    local_batch_size: int = key(8, "sequences a rank computes at once", ge=1, le=2**24)
    global_batch_size: Auto = key(-1, "sequences of one step over all ranks; -1: local batch x data-parallel ranks")
    seq_len: int = key(2048, "tokens of a sequence", ge=1, le=2**27)
    max_norm: float = key(1.0, "gradients are scaled down to this global norm; 0: never", ge=0)
    steps: int = key(10000, "optimizer steps", ge=1)
    enable_cpu_offload: bool = key(False, "keep parameters and optimizer state in host memory")
    dtype: Dtype = key("float32", "parameters, gradients and optimizer state")
    mixed_precision_param: Dtype = key("bfloat16", "computation")
    mixed_precision_reduce: Dtype = key("float32", "reduction of gradients over ranks")
    gc_freq: int = key(50, "steps between two garbage collections", ge=1)
    dataloader: DataLoader = Field(default_factory=DataLoader)


class Data(Section):
    """How documents become sequences"""

    shuffle: bool = key(True, "another order each epoch; false: the order of the files")
    add_bos: bool = key(True, "put the BOS token before each document")
    add_eos: bool = key(True, "put the EOS token after each document")
    bos_id: int | None = key(None, "id of BOS; none: the tokenizer's", ge=0, le=2**31 - 1)
    eos_id: int | None = key(None, "id of EOS; none: the tokenizer's", ge=0, le=2**31 - 1)
    bos_token: str | None = key(None, "BOS by its name in the vocabulary, in place of an id", min_length=1)
    eos_token: str | None = key(None, "EOS by its name in the vocabulary, in place of an id", min_length=1)
    on_bad_record: Literal["raise", "skip"] = key("raise", "what an unreadable record does")
    cache_folder: PathText = key("", "folder of tokenized data; empty: the user's cache folder")
    order: Literal["native", "source"] = key(
        "native", "the order of ours, or that of the program that the files were made for: megatron, nanoset"
    )
    packing: Literal["concat", "documents", "best_fit"] = key(
        "concat",
        "concat: documents one after the other, cut into windows; documents: the same, none sees another; "
        "best_fit: none sees another, and whole documents fill the rows",
    )
    args: dict[str, Any] = key({}, "options of the data set")
    sources: list[dict[str, Any]] = key([], "tables of several data sets, blended by their weights, in stages")
    max_epochs: int | None = key(None, "refuse to read a source more often than this; none: as often as it takes", ge=1)


class Validation(Section):
    """The loss on data that are not trained on"""

    enable: bool = key(False, "after the first step, every freq steps and after the last one")
    dataset: str = key("c4_validation", "kind of data set")
    dataset_path: PathText | None = key(None, "its file, folder or glob")
    args: dict[str, Any] = key({}, "options of the data set")
    local_batch_size: int | None = key(
        None, "sequences a rank computes at once; none: training.local_batch_size", ge=1, le=2**24
    )
    global_batch_size: int | None = key(
        None, "sequences that steps counts as one step, over all ranks; none: those of a training step", ge=1, le=2**24
    )
    seq_len: int | None = key(None, "tokens of a sequence; none: training.seq_len", ge=1, le=2**27)
    freq: int = key(10, "steps between two rounds", ge=1)
    steps: Auto = key(-1, "a round is the first steps x global batch sequences of the data; -1: all of it")
    sets: list[dict[str, Any]] = key([], "tables of several data sets, each with a name, in place of the one here")
    dataloader: DataLoader = Field(default_factory=DataLoader)


class Parallelism(Section):
    """How the model is spread over the ranks"""

    data_parallel_replicate_degree: int = key(1, "copies of the sharded model", ge=1)
    data_parallel_shard_degree: Auto = key(-1, "ranks a copy is sharded over; -1: all that are left")
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key(
        "default",
        "free gathered weights after the forward pass; default: those of blocks, none in a pipeline",
    )
    tensor_parallel_degree: int = key(1, "ranks that share each layer's heads and features, and tokens between", ge=1)
    disable_loss_parallel: bool = key(False, "gather the logits of tensor ranks before the loss")
    context_parallel_degree: int = key(1, "ranks that share the tokens of each row", ge=1)
    context_parallel_method: Literal["gather", "ulysses"] = key(
        "gather", "gather keys and values of all tokens, or exchange tokens for heads around attention"
    )
    context_parallel_load_balancer: Literal["headtail", "none"] = key(
        "headtail", "gather: a rank holds an early and a late piece of each row, or one piece"
    )
    pipeline_parallel_degree: int = key(1, "ranks that hold the layers one after the other; each may hold stages", ge=1)
    pipeline_parallel_schedule: ScheduleName = key("1F1B", "order in which micro-batches pass the stages")
    pipeline_parallel_schedule_csv: PathText = key("", "file with an order of your own, a line for each rank")
    pipeline_parallel_microbatch_size: int = key(1, "rows of a micro-batch of the pipeline", ge=1)
    pipeline_parallel_layers_per_stage: int | None = key(
        None, "layers of a stage; none: one or two stages a rank", ge=1
    )
    pipeline_parallel_first_stage_less_layers: int = key(1, "layers that the embedding weighs", ge=0, le=1000)
    pipeline_parallel_last_stage_less_layers: int = key(1, "layers that the head weighs", ge=0, le=1000)
    module_fqns_per_model_part: list[list[str]] | None = key(None, "modules of each stage; none: worked out")


class ActivationCheckpoint(Section):
    """What is kept of the forward pass, and what computed again in the backward pass to save memory"""

    mode: Literal["none", "full", "selective", "memory_budget"] = key(
        "none",
        "full: blocks keep their inputs alone; selective: some blocks do, or all keep some results; memory_budget: "
        "the compiler chooses",
    )
    selective_ac_option: Annotated[str, Field(pattern="^(op|[1-9][0-9]{0,5})$")] = key(
        "2", "selective: a number n for every n-th block, or op: attention and every other matrix product are kept"
    )
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[Annotated[str, Field(min_length=1)]] = key(
        ["moe.router.gate"], "op: parts of names of linear maps; no product by a weight of such a shape is kept"
    )
    early_stop: bool = key(False, "stop computing again as soon as all is there that the backward pass needs")
    memory_budget: float = key(0.5, "memory_budget: what is kept, from 0 as with full to 1 as with none", ge=0, le=1)
    preserve_rng_state: bool = key(True, "draw the same random numbers when computing again; false saves a little")
    determinism_check: Literal["default", "none"] = key(
        "default", "compare shapes and types of what is computed again with the first time"
    )
    debug: bool = key(False, "on an error, show the operations of both times; slow, and not with op")

    @property
    def per_op(self) -> bool:
        return self.mode == "selective" and self.selective_ac_option == "op"


class Compile(Section):
    """Compiling by torch.compile"""

    enable: bool = key(False, "compile what components names; the first step then takes a minute or more")
    components: list[Literal["model", "loss"]] = key(["model", "loss"], "model: each block; loss", min_length=1)
    backend: str = key("inductor", "compiler: inductor, or one registered with torch")


class Checkpoint(Section):
    """What is saved and loaded"""

    enable: bool = key(False, "save, and continue from what is saved")
    folder: FolderText = key("checkpoint", "folder of the steps in job.dump_folder, or a URL such as s3://bucket/run")
    interval: int = key(500, "steps between two saves; the last step is always saved", ge=1)
    keep_latest_k: Literal[0] | Annotated[int, Field(ge=2)] = key(
        10, "complete steps that are kept; 0: all; not 1, so that one is left while the next is written"
    )
    keep_every_n_steps: int | None = key(None, "multiples of it are kept for good beside those", ge=1)
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key(
        "disabled", "write while training goes on: from a copy by a thread, or by a process that shares the copy"
    )
    save_timeout_seconds: int = key(
        3600, "how long training may wait for a save, which is the last one or not asynchronous", ge=1, le=10_000_000
    )
    load_step: int = key(-1, "step to continue from; -1: the newest complete one", ge=-1)
    initial_load_path: FolderText | None = key(
        None, "checkpoint to start from while the folder holds none: a step, or a folder with steps; also a URL"
    )
    initial_load_model_only: bool = key(True, "take only the weights from there")
    initial_load_in_hf: bool = key(False, "what lies there is a Hugging Face model")
    exclude_from_loading: list[Literal["model", "optimizer", "lr_scheduler", "dataloader", "train_state"]] = key(
        [], "parts that start anew when a checkpoint is loaded"
    )
    enable_first_step_checkpoint: bool = key(False, "save after the first step as well")
    load_only: bool = key(False, "never save")
    last_save_model_only: bool = key(False, "leave the weights alone in step-N-export beside the last step")
    last_save_in_hf: bool = key(False, "leave them there as a Hugging Face model")
    export_dtype: Literal["float32", "bfloat16", "float16"] = key("float32", "type of the weights that are left alone")


class Comm(Section):
    """How long ranks wait for each other"""

    init_timeout_seconds: int = key(300, "until the first step is done", ge=1, le=10_000_000)
    train_timeout_seconds: int = key(100, "after it", ge=1, le=10_000_000)


class Debug(Section):
    """Repeatability"""

    seed: int = key(0, "of weights, data order and what a step draws", ge=0, lt=2**63)
    deterministic: bool = key(False, "only deterministic kernels: the same command gives the same bits")
    deterministic_warn_only: bool = key(False, "warn where there is no such kernel, instead of failing")


class JobConfig(Section):
    """The resolved configuration. Two are equal that say the same, wherever it was written."""

    job: Job = Field(default_factory=Job)
    metrics: Metrics = Field(default_factory=Metrics)
    model: Model = Field(default_factory=Model)
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = Field(default_factory=LRScheduler)
    loss: Loss = Field(default_factory=Loss)
    trainer: Trainer = Field(default_factory=Trainer)
    training: Training = Field(default_factory=Training)
    data: Data = Field(default_factory=Data)
    validation: Validation = Field(default_factory=Validation)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = Field(default_factory=ActivationCheckpoint)
    compile: Compile = Field(default_factory=Compile)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    comm: Comm = Field(default_factory=Comm)
    debug: Debug = Field(default_factory=Debug)
    converter_args: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of each converter in ``model.converters``; in a file they stand in the table of the converter's name."""

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def source(self, key: str) -> str:
        """Where the value of ``key`` was written: a file, "command line" or "default"; for a table maybe several."""
        inner = {source: None for name, source in self._sources.items() if f"{name}.".startswith(f"{key}.")}
        outer = [source for name, source in self._sources.items() if key.startswith((f"{name}.", f"{name}["))]
        return " and ".join(inner or outer) or "default"

    def value(self, key: str) -> Any:
        """The value of ``key``, or UNKNOWN where the configuration has none."""
        found: Any = self
        for name, options in self.converter_args.items():
            if key.startswith(f"{name}."):
                found, key = options, key.removeprefix(f"{name}.")
        for part in key.replace("[", ".[").split("."):
            if part[:1] == "[" and isinstance(found, list):  # such as optimizer.groups[0].lr
                found = found[int(part[1:-1])]
            else:
                found = found.get(part, UNKNOWN) if isinstance(found, Mapping) else getattr(found, part, UNKNOWN)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JobConfig):
            return NotImplemented
        origin = {"job": {"config_file"}}
        return self.model_dump(exclude=origin) == other.model_dump(exclude=origin)


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel], dict[str, Option]]]:
    options = {}
    inner = []
    for name, field in model.model_fields.items():
        # In Python 3.10 list[str] passes for a class as well.
        if (
            inspect.isclass(field.annotation)
            and not get_origin(field.annotation)
            and issubclass(field.annotation, Section)
        ):
            inner.append((f"{prefix}{name}", field.annotation))
        else:
            options[f"{prefix}{name}"] = option_from_field(name, field)
    if prefix:
        yield prefix[:-1], model, options
    for name, section in inner:
        yield from _walk(section, f"{name}.")


SECTIONS: dict[str, str] = {}
"""Name of each section → what it is about; in the order they are shown."""
KEYS: dict[str, Option] = {}
"""Every declared key, by its full name."""
for _name, _model, _options in _walk(JobConfig, ""):
    SECTIONS[_name] = _model.__doc__ or ""
    KEYS.update(_options)

TABLES = frozenset(name for name, option in KEYS.items() if isinstance(option.default, dict))
"""Keys that hold a table whose entries are given and shown one by one."""
