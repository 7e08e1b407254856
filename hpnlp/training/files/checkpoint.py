"""Checkpoints: saving and restoring everything that a run needs to resume.

A checkpoint is an orbax composite of four or five items. `params` holds the parameters. `rest` holds the other fields of the
training state: step, optimizer state, averaged parameters, loss scale. `carry` holds the carry, if the model has one, which
only the run itself reads. `data` holds the state of the data iterator. `record` holds the format version, the progress of the
loop, and checksums of the other items, because orbax restores flipped bits in array data without an error. A converted model is
saved at CONVERTED_STEP with the items `params` and `record` only.

The training loop decides when to save (`loop._Run.checkpoint_is_due`), and restores the newest checkpoint when a run resumes
(`start.find_start`). `claim` decides whether a run may resume in a directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import math
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint import multihost

from hpnlp.errors import TemporaryError, is_full_disk, is_temporary
from hpnlp.models import variables
from hpnlp.training.files.best import ScoreOrder
from hpnlp.training.files.checksum import checksum, type_text, verify
from hpnlp.training.files.contents import checked_directory
from hpnlp.training.optimizers.state_shardings import TrainState
from hpnlp.training.processes.attempts import Fence
from hpnlp.types import InputError, JSONValue

FORMAT = 1  # version of the composite; checkpoints of other versions are refused
CONVERTED_STEP = 0  # step of a checkpoint that holds a converted model: its parameters, and no other state
LARGE_BYTES = 2**20  # replicated shards from this size on are read from all devices at once


def _barrier(key: str, timeout_ms: int) -> None:
    """Waits for all processes. Raises the error that a background thread handles: others wait elsewhere, for 20 minutes."""
    error = sys.exception()
    if error is not None and threading.current_thread() is not threading.main_thread():
        raise error
    multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


class Checkpointer:
    """The checkpoints of one run directory.

    Checkpoints are written in the background. A checkpoint that was interrupted is never listed, and is removed when the run
    resumes. The newest `keep` checkpoints and the one with the best held-out score are kept.
    """

    def __init__(
        self,
        workdir: str | Path,
        keep: int = 2,
        *,
        read_only: bool = False,
        metric: str = "loss",
        higher_is_better: bool = False,
        fence: Fence | None = None,
    ) -> None:
        """Opens the directory `checkpoints` of a run.

        Args:
          workdir: The run directory.
          keep: Number of newest checkpoints to keep.
          read_only: Create and delete nothing; for a run that another process may be training.
          metric: Name of the held-out score.
          higher_is_better: Direction of the held-out score.
          fence: Checked before a checkpoint is committed.

        Raises:
          InputError: The directory cannot be created or read.
        """
        self.directory = checked_directory(workdir) / "checkpoints"
        self._order = ScoreOrder(metric, higher_is_better)
        by_key: Any = self._order.key  # annotated as a number, and only compared
        best = policies.BestN(get_metric_fn=by_key, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
            best_fn=by_key,
            best_mode="max",
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=False,
            step_prefix=None,
            async_options=ocp.AsyncOptions(barrier_sync_fn=_barrier) if jax.process_count() > 1 else None,
            temporary_path_class=None if fence is None else _fenced_path(fence),
        )
        with self._disk("open"):
            if not read_only:
                self.directory.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    @staticmethod
    def exist(workdir: str | Path) -> bool:
        """True if a run directory holds a complete checkpoint.

        Args:
          workdir: The run directory. Nothing is created.

        Returns:
          Whether there is one.
        """
        return _has_complete(Path(workdir) / "checkpoints")

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint.

        Returns:
          The step, or None if there is no checkpoint.
        """
        return self._manager.latest_step()

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of a step."""
        self._manager.delete(step)

    def best(self) -> int | None:
        """Step of the checkpoint with the best held-out score, see `ScoreOrder`.

        Returns:
          The step; of the newest checkpoint if none was evaluated; None if there is no checkpoint.
        """
        best = self._manager.best_step()
        return self.latest() if best is None else best

    def save(
        self, state: TrainState, data: JSONValue, progress: Mapping[str, Any], scores: Mapping[str, float] | None = None
    ) -> None:
        """Starts writing a checkpoint in the background.

        Args:
          state: The training state.
          data: State of the data iterator, as JSON values.
          progress: State of the training loop, as JSON values.
          scores: Held-out scores by name, if the state was evaluated and may be the best.

        Raises:
          InputError: An earlier write has failed.
        """
        local = jax.tree.map(_without_replicas, state)
        carry = {} if state.carry is None else {"carry": ocp.args.StandardSave(local.carry)}
        items = {
            "params": ocp.args.StandardSave(local.params),
            "rest": ocp.args.StandardSave(_without_params(local)),
            **carry,
            "data": ocp.args.JsonSave({"state": data}),
            "record": ocp.args.JsonSave(
                {"format": FORMAT, "checksums": _checksums(state, data), "progress": dict(progress)}
            ),
        }
        with self._disk("save to"):
            metrics = None if scores is None else self._order.stored(scores)
            self._manager.save(int(state.step), args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def save_params(self, params: PyTree) -> None:
        """Writes the parameters of a converted model as CONVERTED_STEP, and waits until they are on disk.

        Args:
          params: The parameters.
        """
        record = {"format": FORMAT, "checksums": {"params": checksum(params)}}
        items = {"params": ocp.args.StandardSave(params), "record": ocp.args.JsonSave(record)}
        with self._disk("save to"):
            self._manager.save(CONVERTED_STEP, args=ocp.args.Composite(**items), force=True)
        self.wait()

    def holds_params_only(self) -> bool:
        """True if the newest checkpoint is one of `save_params`.

        Returns:
          Whether it is.
        """
        return self.latest() == CONVERTED_STEP

    def saving(self) -> bool:
        """True while a checkpoint is being written.

        Returns:
          Whether one is.
        """
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Waits until all checkpoints are on disk; raises InputError if one could not be written."""
        with self._disk("save to"):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Waits for writes in progress and releases the directory."""
        self._manager.close()

    def check_saved(self, step: int, params: PyTree, counter: PyTree = None) -> None:
        """Reads a small part of a checkpoint back from the disk: its record, its smallest parameter and its step counter.

        Args:
          step: Step of a checkpoint that `save` or `save_params` has written.
          params: The parameters, or their shapes with shardings.
          counter: Shape of the state's step counter; None for a checkpoint of `save_params`, which has none.

        Raises:
          InputError: The checkpoint is not listed, or the part cannot be read.
        """
        self._manager.reload()
        items = {"params": _smallest_leaf(params)}
        if counter is not None:
            items["rest"] = {"step": counter}
        with self._read_back(step):
            self._check_items(step, items)

    def _check_items(self, step: int, items: Mapping[str, Any]) -> None:
        """Reads the leaves of `items`, item name -> tree, and compares their checksums."""
        expected = self._record(self.step_of(step))["checksums"]
        with _without_tracebacks(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            for item, tree in items.items():
                args = ocp.args.PyTreeRestore(
                    item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
                )
                sums = checksum(reader.restore(self.directory / str(step) / item, args=args))
                verify({item: {name: expected[item].get(name) for name in sums}}, {item: sums})

    def restore(self, shapes: TrainState, step: int | None = None) -> tuple[TrainState, Any, dict[str, Any]]:
        """Reads everything that `save` has written.

        Args:
          shapes: Shapes of the state, with the shardings to restore it with; they may differ from those it was saved with.
            A carry is read if they have one.
          step: Step of the checkpoint; None for the newest.

        Returns:
          `(state, state of the data iterator, progress)`.

        Raises:
          InputError: There is no such checkpoint, it is damaged, or it is of another model or optimizer.
        """
        step = self.step_of(step)
        record = self._record(step)
        carry = {} if shapes.carry is None else {"carry": shapes.carry}
        self._check_fits(step, record, {"params": shapes.params, "rest": _without_params(shapes), **carry})
        with self._readable(step):
            args = {
                "params": ocp.args.StandardRestore(shapes.params),
                "rest": ocp.args.StandardRestore(_without_params(shapes)),
                "data": ocp.args.JsonRestore(),
                **{name: ocp.args.StandardRestore(tree) for name, tree in carry.items()},
            }
            items = self._manager.restore(step, args=ocp.args.Composite(**args))
            fields, data = items["rest"], items["data"]["state"]
            state = TrainState(
                fields["step"],
                items["params"],
                fields["opt_state"],
                fields.get("ema"),
                fields.get("scale"),
                fields.get("buffers"),
                items["carry"] if carry else None,
                fields.get("averaged"),
            )
            verify(record["checksums"], _checksums(state, data))
            progress = _checked_progress(record["progress"])
        return state, data, progress

    def restore_params(self, shapes: TrainState, step: int | None = None) -> Any:
        """Reads the weights for evaluation and generation (`TrainState.best_params`).

        Args:
          shapes: Shapes of the state, with the shardings to restore it with.
          step: Step of the checkpoint; None for the newest.

        Returns:
          The weights.

        Raises:
          InputError: There is no such checkpoint, it is damaged, or it is of another model.
        """
        step = self.step_of(step)
        is_split = shapes.ema is not None or shapes.buffers is not None
        if is_split and step != CONVERTED_STEP:
            return self.restore(dataclasses.replace(shapes, carry=None), step)[0].best_params
        record, weights = self._record(step), variables.join(shapes.params, shapes.buffers)
        self._check_fits(step, record, {"params": weights})
        with self._readable(step):
            args = ocp.args.Composite(params=ocp.args.StandardRestore(weights))
            params = self._manager.restore(step, args=args)["params"]
            verify(record["checksums"], {"params": checksum(params)})
        return params

    def step_of(self, step: int | None) -> int:
        """Step of an existing checkpoint.

        Args:
          step: The step, or None for the newest checkpoint.

        Returns:
          The step.

        Raises:
          InputError: There is no such checkpoint.
        """
        resolved = self.latest() if step is None else step
        if resolved is None or resolved not in self._manager.all_steps():
            steps = ", ".join(str(s) for s in self._manager.all_steps()) or "none"
            problem = f"no checkpoint {step or ''} in {self.directory} (there: {steps})"
            raise InputError(f"{problem}: train first, or name another")
        return resolved

    def _record(self, step: int) -> dict[str, Any]:
        """The item `record`; raises InputError if it is unreadable or of another format version."""
        with self._readable(step):
            record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
            version = record.get("format")
        if version != FORMAT:
            raise InputError(
                f"checkpoint {step} in {self.directory} has format {version}, this version reads {FORMAT}: "
                "use the version of hpnlp that wrote it"
            )
        return record

    def _check_fits(self, step: int, record: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
        """Raises InputError if another model or optimizer was saved; orbax would report that as damage."""
        for item, tree in shapes.items():
            with self._readable(step):
                checksums = record["checksums"].get(item, {}) if item == "carry" else record["checksums"][item]
                saved = {name: text.rpartition(":")[0] for name, text in checksums.items()}
            leaves = jax.tree_util.tree_leaves_with_path(tree)
            expected = {jax.tree_util.keystr(path): type_text(leaf) for path, leaf in leaves}
            fix = "give the run its old config back, or the version of hpnlp that began it, or choose another workdir"
            if item == "carry":
                fix = "give the run its old data.batch_size and model back, or begin another run with train.init_from"
            for name in [*expected, *saved]:
                if saved.get(name) != expected.get(name):
                    raise InputError(
                        f"checkpoint {step} in {self.directory} does not fit this config: {item}{name} was saved as "
                        f"{saved.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}: {fix}"
                    )

    @contextlib.contextmanager
    def _disk(self, verb: str) -> Iterator[None]:
        """Turns errors of the disk into InputErrors: `cannot {verb} DIRECTORY: reason: fix`."""
        try:
            yield
        except InputError:
            raise
        except (OSError, ValueError) as error:
            text = str(error)
            is_full = is_full_disk(error)
            reason = "the disk is full" if is_full else _first_line(text)
            fix = "free some space" if is_full else "check the path and its permissions"
            intact = "; earlier checkpoints are intact" if _has_complete(self.directory) else ""
            message = f"cannot {verb} {self.directory}: {reason}{intact}: {fix} and run the same command again"
            raise (TemporaryError if is_temporary(error) else InputError)(message) from error

    @contextlib.contextmanager
    def _read_back(self, step: int) -> Iterator[None]:
        """Turns errors of reading a checkpoint that this process has written into InputErrors."""
        try:
            yield
        except Exception as error:
            raise InputError(
                f"checkpoint {step} was written to {self.directory} and cannot be read back ({_first_line(str(error))}): check "
                "the disk; nothing was deleted, and the same command goes on from the newest checkpoint that can be read"
            ) from error

    @contextlib.contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        """Turns errors of reading a checkpoint, of which orbax and tensorstore raise many types, into InputErrors."""
        try:
            with _without_tracebacks():
                yield
        except Exception as error:
            earlier = [s for s in self._manager.all_steps() if s < step]
            effect = f"the run goes on from step {max(earlier)}" if earlier else "the run starts anew"
            raise InputError(
                f"checkpoint {step} cannot be read ({_first_line(str(error))}): if it is damaged, delete "
                f"{self.directory / str(step)}, and {effect}"
            ) from error


def _fenced_path(fence: Fence) -> type[ocp.path.atomicity.AtomicRenameTemporaryPath]:
    """Orbax's directory of a checkpoint that is being written, which checks the fence before it is renamed to its step."""

    class FencedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
        async def finalize(self) -> None:
            fence.check()
            await super().finalize()

    return FencedPath


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keeps the background tasks of a failed restore from printing tracebacks.

    A restore reads many arrays concurrently. When one read fails, the others end a little later, in an event loop that is
    closed by then, and each of them would print a traceback of its own.
    """
    log = logging.getLogger("asyncio")
    hooks, level = (sys.excepthook, sys.unraisablehook), log.level
    sys.excepthook = sys.unraisablehook = lambda *_: None
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception:
        time.sleep(0.2)  # until the other reads have ended
        gc.collect()
        raise
    finally:
        sys.excepthook, sys.unraisablehook = hooks
        log.setLevel(level)


def _has_complete(directory: Path) -> bool:
    """True if a directory holds a complete checkpoint: orbax renames it to its step as the last act of a save."""
    try:
        return any(path.name.isdecimal() and path.is_dir() for path in directory.iterdir())
    except OSError:
        return False


def _smallest_leaf(tree: Any) -> dict[str, Any]:
    """The nested dicts with their smallest leaf only."""
    path, subtree = min(jax.tree_util.tree_leaves_with_path(tree), key=lambda leaf: leaf[1].size)
    for key in reversed(path):
        subtree = {key.key: subtree}
    return subtree


def _without_params(state: TrainState) -> dict[str, Any]:
    """Content of the item `rest`; the names are part of the format."""
    fields = {"step": state.step, "opt_state": state.opt_state, "ema": state.ema, "scale": state.scale}
    fields |= {"buffers": state.buffers, "averaged": state.averaged}
    return {name: value for name, value in fields.items() if value is not None}


def _without_replicas(x: Any) -> Any:
    """Keeps one copy of each small shard, if all devices belong to this process.

    Orbax divides a shard among all devices that hold it, and compiles a program for each part, which takes longer than to read
    the whole shard from one of them unless it is large.
    """
    sharding = x.sharding if isinstance(x, jax.Array) else None
    if (
        not isinstance(sharding, NamedSharding)
        or not isinstance(mesh := sharding.mesh, Mesh)
        or jax.process_count() > 1
    ):
        return x
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    divided = set(jax.tree.leaves(tuple(sharding.spec)))
    devices = mesh.devices[tuple(slice(None if name in divided else 1) for name in mesh.axis_names)]
    if devices.size == mesh.size or math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize >= LARGE_BYTES:
        return x
    smaller = NamedSharding(
        Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), sharding.spec, memory_kind=sharding.memory_kind
    )
    return jax.make_array_from_single_device_arrays(x.shape, smaller, [shards[device] for device in devices.flat])


def _checksums(state: TrainState, data: JSONValue) -> dict[str, Any]:
    """Item -> path of each of its arrays -> checksum; the data iterator's state has one checksum."""
    return {
        "params": checksum(state.params),
        "rest": checksum(_without_params(state)),
        **({} if state.carry is None else {"carry": checksum(state.carry)}),
        "data": {"state": zlib.crc32(json.dumps(data, sort_keys=True).encode())},
    }


def _first_line(text: str) -> str:
    line = (text.partition(" See full TensorStore details")[0].strip().splitlines() or ["unknown error"])[0]
    return line if len(line) <= 300 else f"{line[:300]} ..."


def _checked_progress(progress: dict[str, Any]) -> dict[str, Any]:
    """The loop's progress, which has no checksum; raises ValueError if it holds other values than the loop's numbers."""
    numbers = [progress["bad_evals"], progress.get("peak_memory_bytes", 0), *progress["seconds"].values()]
    numbers += [progress[name] for name in ("best", "best_loss") if progress.get(name) is not None]
    numbers += progress.get("scores", [])  # absent from checkpoints of early versions
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError(f"record['progress'] holds other than numbers: {progress!r:.100}")
    return progress
