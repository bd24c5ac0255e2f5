"""The options of a training run: a configuration file, and the command line over it.

    steps = 300                  # configuration.toml: an option of the command line in each line, without its dashes
    learning-rate = 1e-3
    checkpointing = true

    python train_llama.py --config configuration.toml --steps 10        # the file's options, but 10 steps

Paths in a file are taken as on the command line: from the folder one stands in.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from hybrid_training import HybridOptions

from common import options
from common.errors import UsageError
from common.models.huggingface import read_config
from common.models.transformer import TransformerConfig
from common.options import Count, Size, Within, check_folder

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

T = TypeVar("T")
CountOrNone = Annotated[int, Within(0, 10**9)]
Factor = Annotated[float, Within(0, 1e30)]


@dataclass
class TrainOptions(HybridOptions, without=("benchmark", "scaling")):
    """Everything that a run can be told."""

    config: Path | None = None
    """TOML file with options; those of the command line come over them."""
    model: str = "llama-tiny"
    """A name of common/models/configs.py."""
    init: Path | None = None
    """Folder with a model of Hugging Face's to begin with, instead of --model."""
    steps: CountOrNone = 100
    """Steps of the whole run, those before it was resumed included."""
    batch: Size = 16
    """Samples of the global batch; places along dp and ep take parts that differ by one sample at the most."""
    sequence: Size = 64
    """Tokens of a sample."""
    dtype: Literal["float64", "float32"] = "float32"
    """Type of weights and gradients."""
    tokens: Literal["bytes", "uint16", "uint32"] = "bytes"
    """How to read --data: bytes of text, or a file of token numbers; a .npy file says itself what it holds."""
    learning_rate: Factor = 1e-3
    """The largest; it grows to it for --warm-up steps, then falls along a cosine."""
    warm_up: CountOrNone = 10
    """Steps in which the learning rate grows."""
    final: Factor = 0.1
    """Share of the learning rate that the last step has."""
    weight_decay: Factor = 0.1
    """AdamW's, on matrices and embeddings; norms and biases have none."""
    clip: Factor = 1.0
    """Largest norm of the gradient; 0 leaves it as it is."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is not finite does: stop all ranks, or leave out the step."""
    log_every: Count = 10
    """Steps from one line of numbers to the next."""
    evaluate_every: CountOrNone = 50
    """Steps between evaluations; there is one more at the end. 0 for none."""
    evaluation: Count = 64
    """Samples of the validation text in an evaluation, the same ones every time."""
    generate: CountOrNone = 0
    """Tokens of text to write after each evaluation, and at the end."""
    prompt: str = "def "
    """What that text begins with."""
    temperature: Factor = 0.8
    """0 takes the likeliest token; 1 draws as the model says."""
    checkpoints: Path | None = None
    """Folder for checkpoints, seen by all ranks. The newest good one in it is where the run begins."""
    checkpoint_every: Count = 100
    """Steps between checkpoints; there is one more at the end, and when the run is told to stop."""
    keep: Count = 3
    """Checkpoints to keep."""
    asynchronous: bool = False
    """Write checkpoints while training goes on."""
    resume: Literal["auto", "no"] = "auto"
    """no: begin anew; the folder of checkpoints must be empty, or what is in it would be taken for this run's."""
    export: Path | None = None
    """Folder for the trained model as Hugging Face's transformers reads it."""
    tensorboard: Path | None = None
    """Folder for TensorBoard."""
    peak_tflops: Factor | None = None
    """What a rank's device can do, its share where ranks share one, in 10^12 operations a second, for MFU; measured by
    products of matrices if left out."""
    trace: Path | None = None
    """Folder for Chrome traces: of this run's third step, and of the next one after a rank gets SIGUSR1."""
    plot: Path | None = None
    """Picture of all runs in the --json file, drawn at the end."""
    timeout: Annotated[float, Within(1e-3, 1e6)] = 60.0
    """Seconds, the longest that any wait may last, also that for the disk to take a checkpoint or --export."""
    trace_all: ClassVar[bool] = False

    def model_config(self) -> TransformerConfig:
        """The model's shape: that of the folder, or of the name."""
        return read_config(self.init) if self.init else super().model_config()

    def look_at_data(self) -> None:
        """A file of tokens may be larger than the memory: `Shuffled` looks at it."""

    def check(self) -> None:
        """Raises UsageError for options that contradict one another."""
        super().check()
        if self.plot and not self.json:
            raise UsageError(f"--plot {self.plot} draws what is in the --json file; give that, too")
        if self.generate:
            prompt = self.prompt.encode(errors="surrogateescape")
            if not prompt or max(prompt) >= self.model_config().vocabulary:
                raise UsageError(
                    f"--prompt {self.prompt!a} is taken as bytes; --generate needs at least one, and a model that "
                    f"knows them: its vocabulary is {self.model_config().vocabulary}"
                )

    def make_folders(self) -> None:
        """What will be written at the end can be written now. Raises UsageError."""
        for name in ("checkpoints", "export", "trace", "tensorboard", "plot"):
            target: Path | None = getattr(self, name)
            if target is not None:
                check_folder(name, target, target.absolute().parent if name == "plot" else target)


def parse(options_type: type[T], description: str | None = None, args: Sequence[str] | None = None) -> T:
    """The options of the command line over those of its --config file. Raises UsageError for a bad file."""
    given = list(sys.argv[1:] if args is None else args)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path, nargs="?")  # tyro says what is wrong with one without a value
    file = finder.parse_known_args(given)[0].config
    default = from_file(options_type, file) if file else options_type()
    return options.parse(options_type, description, given, default)


def from_file(options_type: type[T], file: Path) -> T:
    """The options of a file. Raises UsageError for a file, a key or a value that is none."""
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"cannot read --config {file}: Not a regular file")  # a device may never end
        content = tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read --config {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {file} is not TOML: {error}") from None
    known = [field.name.replace("_", "-") for field in fields(options_type)]  # type: ignore[arg-type]
    args: list[str] = []
    for key, value in content.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else "--help shows what there is"
            raise UsageError(f"{file}: there is no option {key!r}; {hint}")
        arg = as_arguments(key, value)
        try:
            options.parse(options_type, args=arg)
        except UsageError as error:
            raise UsageError(f"{file}: {key} = {value!r}: {error}") from None
        args += arg
    return options.parse(options_type, args=args)


def as_arguments(key: str, value: object) -> list[str]:
    """One line of the file as arguments of the command line."""
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    return [f"--{key}={value}"]
