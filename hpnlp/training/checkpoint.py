"""Checkpoints: everything that a run needs to go on, in one composite that orbax writes in the background."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import re
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from hpnlp.training.step import TrainState
from hpnlp.types import InputError

FORMAT = 1  # of the composite below; a reader refuses what it does not know

# Parts of a path that orbax and tensorstore do not take literally. Orbax merges what each process wrote after a glob over the
# whole path, tensorstore reads a backslash as a slash, and etils turns the directory `gs:` into an address.
_NOT_LITERAL = re.compile(r"[*?\[\\]|(?<=/)gs:(?=/)")


def checked_directory(workdir: str | Path, argument: str = "workdir") -> Path:
    """The absolute path of a run directory whose checkpoints can be read back.

    Args:
        workdir: the directory, which need not exist.
        argument: its name in messages.

    Raises:
        InputError: the absolute path has a character that the checkpoint libraries do not take literally, or is not UTF-8.
    """
    directory = Path(workdir).absolute()
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{argument} {str(workdir)!r}: the path {str(directory)!r} is not UTF-8, and checkpoints in it could not be "
            "written: rename that directory, or choose another one"
        ) from None
    if found := _NOT_LITERAL.search(f"{directory}/"):
        raise InputError(
            f"{argument} {str(workdir)!r}: checkpoints under a path with {found[0]!r} could not be read back ({directory}): "
            "rename that directory, or choose another one"
        )
    return directory


class Checkpointer:
    """The checkpoints of one run directory.

    A checkpoint holds `params` (what generation reads), `rest` (optimizer state, step, averaged parameters, loss scale), `data`
    (where the data iterator stands) and `record` (the loop's progress, the format version, and checksums of the others: of
    flipped bits in array data orbax takes no notice). Writing goes on in the background; a checkpoint that was cut off
    is never listed.
    """

    def __init__(self, workdir: str | Path, keep: int = 2, *, read_only: bool = False) -> None:
        """read_only: for a run that another process may be training, whose unfinished checkpoints are left alone."""
        self.directory = checked_directory(workdir) / "checkpoints"
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics["heldout_loss"],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
            best_fn=lambda metrics: metrics["heldout_loss"],
            best_mode="min",
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=False,
            step_prefix=None,
        )
        with self._disk("open"):
            if not read_only:
                self.directory.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    @staticmethod
    def exist(workdir: str | Path) -> bool:
        """True where `workdir` holds a complete checkpoint; makes nothing."""
        return _finished(Path(workdir) / "checkpoints")

    def latest(self) -> int | None:
        """The newest complete checkpoint's step."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step of the checkpoint with the lowest held-out loss, or of the newest where none was scored."""
        best = self._manager.best_step()
        return self.latest() if best is None else best

    def save(self, state: TrainState, data: Any, progress: Mapping[str, Any], loss: float | None = None) -> None:
        """Starts to write; raises InputError where an earlier write has failed. loss: held-out, in nats a token."""
        items = {
            "params": ocp.args.StandardSave(state.params),
            "rest": ocp.args.StandardSave(_rest(state)),
            "data": ocp.args.JsonSave({"state": data}),
            "record": ocp.args.JsonSave(
                {"format": FORMAT, "checksums": _checksums(state, data), "progress": dict(progress)}
            ),
        }
        with self._disk("save to"):
            metrics = None if loss is None else {"heldout_loss": loss}
            self._manager.save(int(state.step), args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def save_params(self, params: Any) -> None:
        """Writes a model that was not trained here, as step 0, and waits for it."""
        record = {"format": FORMAT, "checksums": {"params": _checksum(params)}}
        items = {"params": ocp.args.StandardSave(params), "record": ocp.args.JsonSave(record)}
        with self._disk("save to"):
            self._manager.save(0, args=ocp.args.Composite(**items), force=True)
        self.wait()

    def holds_params_only(self) -> bool:
        """True where the newest checkpoint is one that save_params wrote."""
        return self.latest() == 0

    def saving(self) -> bool:
        """True while a checkpoint is being written."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Returns when everything is on disk; raises InputError where it could not be."""
        with self._disk("save to"):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        self._manager.close()

    def check_saved(self, step: int, params: Any, counter: Any = None) -> None:
        """Reads back a part of checkpoint `step` from the disk: its record, its smallest parameter, and its step counter.

        Args:
            step: of a checkpoint that `save` or `save_params` has written.
            params: the parameters, or their shapes with shardings.
            counter: the shape of the state's step; None for a checkpoint of `save_params`, which has none.

        Raises:
            InputError: the checkpoint is not listed, or a part of it cannot be read.
        """
        self._manager.reload()
        with self._read_back(step):
            self._check_part(
                step, {"params": _smallest(params)} | ({} if counter is None else {"rest": {"step": counter}})
            )

    def _check_part(self, step: int, items: Mapping[str, Any]) -> None:
        expected = self._record(self.step_of(step))["checksums"]
        with _quiet_when_it_fails(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            for item, tree in items.items():
                args = ocp.args.PyTreeRestore(
                    item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
                )
                sums = _checksum(reader.restore(self.directory / str(step) / item, args=args))
                _verify({item: {name: expected[item].get(name) for name in sums}}, {item: sums})

    def restore(self, shapes: TrainState, step: int | None = None) -> tuple[TrainState, Any, dict[str, Any]]:
        """`(state, data iterator's state, progress)` of `step` (default: the newest), laid out as `shapes` says."""
        step = self.step_of(step)
        record = self._record(step)
        self._check_fits(step, record, {"params": shapes.params, "rest": _rest(shapes)})
        with self._readable(step):
            args = {
                "params": ocp.args.StandardRestore(shapes.params),
                "rest": ocp.args.StandardRestore(_rest(shapes)),
                "data": ocp.args.JsonRestore(),
            }
            found = self._manager.restore(step, args=ocp.args.Composite(**args))
            rest, data = found["rest"], found["data"]["state"]
            state = TrainState(rest["step"], found["params"], rest["opt_state"], rest.get("ema"), rest.get("scale"))
            _verify(record["checksums"], _checksums(state, data))
            progress = _checked_progress(record["progress"])
        return state, data, progress

    def restore_params(self, shapes: TrainState, step: int | None = None) -> Any:
        """The parameters for evaluation and generation (averaged, where the run averages) of `step`."""
        step = self.step_of(step)
        if shapes.ema is not None and step > 0:
            return self.restore(shapes, step)[0].ema
        record = self._record(step)
        self._check_fits(step, record, {"params": shapes.params})
        with self._readable(step):
            args = ocp.args.Composite(params=ocp.args.StandardRestore(shapes.params))
            params = self._manager.restore(step, args=args)["params"]
            _verify(record["checksums"], {"params": _checksum(params)})
        return params

    def step_of(self, step: int | None) -> int:
        """The step that `step`, None for the newest, stands for; raises InputError where there is no such checkpoint."""
        found = self.latest() if step is None else step
        if found is None or found not in self._manager.all_steps():
            have = ", ".join(str(s) for s in self._manager.all_steps()) or "none"
            raise InputError(
                f"no checkpoint {step or ''} in {self.directory} (there: {have}): train first, or name another"
            )
        return found

    def _record(self, step: int) -> dict[str, Any]:
        with self._readable(step):
            found = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
            version = found.get("format")
        if version != FORMAT:
            raise InputError(
                f"checkpoint {step} in {self.directory} has format {version}, this version reads {FORMAT}: "
                "use the version of hpnlp that wrote it"
            )
        return found

    def _check_fits(self, step: int, record: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
        """Raises InputError where another model or optimizer was saved, which orbax would take for damage."""
        for item, tree in shapes.items():
            with self._readable(step):
                saved = {name: found.rpartition(":")[0] for name, found in record["checksums"][item].items()}
            leaves = jax.tree_util.tree_leaves_with_path(tree)
            expected = {jax.tree_util.keystr(path): _kind(leaf) for path, leaf in leaves}
            for name in [*expected, *saved]:
                if saved.get(name) != expected.get(name):
                    raise InputError(
                        f"checkpoint {step} in {self.directory} does not fit this config: {item}{name} was saved as "
                        f"{saved.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}: give the run its old "
                        "config back, or the version of hpnlp that began it, or choose another workdir"
                    )

    @contextlib.contextmanager
    def _disk(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            text = str(error)
            full = "No space left" in text or "RESOURCE_EXHAUSTED" in text or "Disk quota" in text
            mend = "free some space" if full else "check the path and its permissions"
            intact = "; earlier checkpoints are intact" if _finished(self.directory) else ""
            raise InputError(
                f"cannot {verb} {self.directory}: {'the disk is full' if full else _first_line(text)}{intact}: {mend} and run "
                "the same command again"
            ) from error

    @contextlib.contextmanager
    def _read_back(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise InputError(
                f"checkpoint {step} was written to {self.directory} and cannot be read back ({_first_line(str(error))}): check "
                "the disk; nothing was deleted, and the same command goes on from the newest checkpoint that can be read"
            ) from error

    @contextlib.contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        try:
            with _quiet_when_it_fails():
                yield
        except Exception as error:  # orbax and tensorstore raise many kinds for a damaged file
            others = [s for s in self._manager.all_steps() if s < step]
            mend = f"the run goes on from step {max(others)}" if others else "the run starts anew"
            raise InputError(
                f"checkpoint {step} cannot be read ({_first_line(str(error))}): if it is damaged, delete "
                f"{self.directory / str(step)}, and {mend}"
            ) from error


@contextlib.contextmanager
def _quiet_when_it_fails() -> Iterator[None]:
    """A restore reads many arrays at a time. When one fails, the others end a little later, in an event loop that is
    gone, and each would print a traceback of its own."""
    log = logging.getLogger("asyncio")
    hooks, level = (sys.excepthook, sys.unraisablehook), log.level
    sys.excepthook = sys.unraisablehook = lambda *_: None
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception:
        time.sleep(0.2)
        gc.collect()
        raise
    finally:
        sys.excepthook, sys.unraisablehook = hooks
        log.setLevel(level)


def _finished(directory: Path) -> bool:
    """True where a complete checkpoint lies in `directory`: orbax gives the directory of one its number as a name last."""
    try:
        return any(path.name.isdecimal() and path.is_dir() for path in directory.iterdir())
    except OSError:
        return False


def _smallest(tree: Any) -> dict[str, Any]:
    """The smallest leaf of nested dicts, in the dicts that lead to it."""
    path, part = min(jax.tree_util.tree_leaves_with_path(tree), key=lambda leaf: leaf[1].size)
    for key in reversed(path):
        part = {key.key: part}
    return part


def _rest(state: TrainState) -> dict[str, Any]:
    rest = {"step": state.step, "opt_state": state.opt_state, "ema": state.ema, "scale": state.scale}
    return {name: part for name, part in rest.items() if part is not None}


@jax.jit
def _words(tree: Any) -> Any:
    """A uint32 for each array: its words times odd numbers that differ with the place, added up modulo 2^32.

    One flipped bit always changes it; it does not depend on how the array is laid out over devices.
    """

    def one(x: jax.Array) -> jax.Array:
        x = jax.device_put(x, jax.memory.Space.Device)  # from the host's memory, where it rests there
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        place = jnp.zeros(x.shape, jnp.uint32)
        for axis, size in enumerate(x.shape):
            place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)

    return jax.tree.map(one, tree)


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _checksum(tree: Any) -> dict[str, int | str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    words = jax.device_get(_words(tree))
    pairs = zip(leaves, jax.tree.leaves(words), strict=True)
    # The dtype stands beside the sum because orbax casts silently to the one that is asked for.
    return {jax.tree_util.keystr(path): f"{_kind(leaf)}:{int(word)}" for (path, leaf), word in pairs}


def _checksums(state: TrainState, data: Any) -> dict[str, Any]:
    return {
        "params": _checksum(state.params),
        "rest": _checksum(_rest(state)),
        "data": {"state": zlib.crc32(json.dumps(data, sort_keys=True).encode())},
    }


def _verify(expected: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> None:
    for item, sums in found.items():
        for name in sums.keys() | expected[item].keys():
            if sums.get(name) != expected[item].get(name):
                raise ValueError(
                    f"{item}{name} is not what was saved: {sums.get(name)}, saved {expected[item].get(name)}"
                )


def _checked_progress(progress: dict[str, Any]) -> dict[str, Any]:
    """Returns the loop's progress, of which no checksum is kept; raises where it does not hold the loop's numbers."""
    numbers = [progress["bad_evals"], progress.get("peak_memory_bytes", 0), *progress["seconds"].values()]
    numbers += [] if progress["best"] is None else [progress["best"]]
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError(f"record['progress'] holds other than numbers: {progress!r:.100}")
    return progress


def _first_line(text: str) -> str:
    line = (text.strip().splitlines() or ["unknown error"])[0]
    return line if len(line) <= 300 else f"{line[:300]} ..."
