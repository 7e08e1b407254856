"""Checkpoints: restoring is exact or raises, and earlier checkpoints stay intact."""

import dataclasses
import json
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from hpnlp.errors import TemporaryError
from hpnlp.parallel.memory.host_offload import on_host
from hpnlp.parallel.plan import Plan
from hpnlp.training.files import checkpoint
from hpnlp.training.files.best import ScoreOrder
from hpnlp.training.files.checkpoint import FORMAT, Checkpointer
from hpnlp.training.optimizers.loss_scale import LossScale
from hpnlp.training.optimizers.state_shardings import TrainState, shapes_with
from hpnlp.training.processes import attempts
from hpnlp.training.processes.attempts import Attempt
from hpnlp.types import InputError
from tests.messages import raises

MESH = Plan("zero3").mesh()
DATA = {"version": 1, "corpus": "5eed", "batches": 2**40}
PROGRESS = {"best": 1.2345678901234567, "bad_evals": 3, "seconds": {"step": 0.1}}


def state_at(step):
    """A state whose values depend on the step, among them -0, denormals, infinities and NaN."""
    draw = np.random.default_rng(step)
    kernel = draw.normal(size=(3, 16, 24)).astype(np.float32)
    kernel.flat[:5] = [-0.0, 1e-42, np.inf, -np.inf, np.nan]
    params = {"layers": {"kernel": jnp.asarray(kernel)}, "scale": jnp.asarray(draw.normal(size=8), jnp.bfloat16)}
    moments = jax.tree.map(lambda p: (p * 2).astype(p.dtype), params)
    adam = optax.ScaleByAdamState(jnp.int32(step), moments, jax.tree.map(jnp.square, moments))
    return lay_out(TrainState(jnp.int32(step), params, (optax.EmptyState(), (adam,)), jax.tree.map(jnp.exp, params)))


def shardings(state, mesh):
    split = {(3, 16, 24): PartitionSpec(None, "fsdp", "tensor"), (8,): PartitionSpec("fsdp")}
    return jax.tree.map(lambda leaf: NamedSharding(mesh, split.get(leaf.shape, PartitionSpec())), state)


def lay_out(state, mesh=MESH):
    return jax.device_put(state, shardings(state, mesh))


def shapes(mesh=MESH, state=None):
    state = jax.eval_shape(lambda: state_at(0)) if state is None else state
    return shapes_with(state, shardings(state, mesh))


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def checkpointer(tmp_path):
    """Makes checkpointers of one directory, and closes them."""
    made = []

    def make(**options):
        made.append(Checkpointer(tmp_path / "run", **options))
        return made[-1]

    yield make
    for checkpoints in made:
        checkpoints.close()


def save(checkpoints, *steps, losses=()):
    for step in steps:
        scores = {"loss": dict(losses)[step]} if step in dict(losses) else None
        checkpoints.save(state_at(step), DATA, PROGRESS, scores)
        checkpoints.wait()


def test_round_trip_is_exact(checkpointer):
    save(checkpointer(), 7)
    state, data, progress = checkpointer().restore(shapes())
    assert_same_bits(state, state_at(7))
    assert data == DATA and type(data["batches"]) is int
    assert progress == PROGRESS


def test_restored_state_can_be_saved_again(checkpointer):
    save(checkpointer(), 7)
    _, data, progress = checkpointer().restore(shapes())
    checkpoints = checkpointer()
    checkpoints.save(state_at(8), {**data, "batches": 3}, progress)
    checkpoints.wait()
    state, data, _ = checkpointer().restore(shapes())
    assert_same_bits(state, state_at(8))
    assert data["batches"] == 3


def test_checkpoint_of_an_earlier_attempt_is_not_committed(checkpointer, tmp_path):
    fence = attempts.claim(tmp_path, Attempt(1, "a"))
    checkpoints = checkpointer(fence=fence)
    save(checkpoints, 7)
    attempts.record(tmp_path, Attempt(2, "b"))
    with pytest.raises(TemporaryError, match="this process belongs to attempt 1:a of .* and the newest is 2:b"):
        save(checkpoints, 8)
    assert checkpointer().latest() == 7


def test_failed_write_does_not_wait_for_other_processes(monkeypatch):
    """Orbax waits for the other processes in a `finally` block of its thread, which they never reach."""
    waited, raised = [], []
    monkeypatch.setattr(
        checkpoint.multihost, "get_barrier_sync_fn", lambda: lambda **names: waited.append(names["key"])
    )

    def write(error):
        try:
            try:
                if error:
                    raise error
            finally:
                checkpoint._barrier("end", 1000)
        except OSError as caught:
            raised.append(caught)

    full = OSError("No space left on device")
    for error in (None, full):
        thread = threading.Thread(target=write, args=(error,))
        thread.start()
        thread.join()
    assert waited == ["end"] and raised == [full]


@pytest.mark.parametrize("plan", [Plan(fsdp=2, tensor=4), Plan()])
def test_restore_onto_another_mesh_is_exact(checkpointer, plan):
    save(checkpointer(), 7)
    mesh = plan.mesh()
    state, _, _ = checkpointer().restore(shapes(mesh))
    assert_same_bits(state, state_at(7))
    assert state.params["layers"]["kernel"].sharding == NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))


def test_offloaded_state_is_restored_to_host_or_device(checkpointer):
    checkpoints, like = checkpointer(), shapes()
    hosted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_host(x.sharding)), like.opt_state
    )
    state = state_at(1)
    moved = jax.device_put(state.opt_state, jax.tree.map(lambda x: x.sharding, hosted))
    checkpoints.save(dataclasses.replace(state, opt_state=moved), DATA, PROGRESS)
    checkpoints.wait()
    for kind, opt_state in (("pinned_host", hosted), ("device", like.opt_state)):
        actual = checkpoints.restore(dataclasses.replace(like, opt_state=opt_state))[0]
        assert_same_bits(actual, state)
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(actual.opt_state)} == {kind}
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(actual.params)} == {"device"}


def test_restore_params_returns_averaged_parameters(checkpointer):
    save(checkpointer(), 7)
    state = state_at(7)
    assert_same_bits(checkpointer().restore_params(shapes()), state.ema)
    plain = TrainState(state.step, state.params, state.opt_state)
    checkpoints = checkpointer()
    checkpoints.save(TrainState(jnp.int32(8), state.params, state.opt_state), DATA, PROGRESS)
    checkpoints.wait()
    assert_same_bits(checkpointer().restore_params(shapes(state=plain)), state.params)


def test_loss_scale_is_restored(checkpointer):
    plain = dataclasses.replace(state_at(7), ema=None)
    scaled = lay_out(dataclasses.replace(state_at(8), scale=LossScale(jnp.float32(2.0**9), jnp.int32(17))))
    checkpoints = checkpointer()
    for state in (plain, scaled):
        checkpoints.save(state, DATA, PROGRESS)
        checkpoints.wait()
        assert_same_bits(checkpoints.restore(shapes(state=state))[0], state)
    raises(r"rest\['scale'\].value was saved as float32\[\], expected nothing", lambda: checkpoints.restore(shapes()))


def test_newest_and_best_are_kept(checkpointer):
    checkpoints = checkpointer(keep=2)
    assert checkpoints.latest() is None
    save(checkpoints, 1, 2)
    assert (checkpoints.latest(), checkpoints.best()) == (2, 2)
    save(checkpoints, 3, 4, 5, 6, 7, losses={3: 2.0, 4: 1.0, 5: 1.5})
    again = checkpointer(keep=2)
    assert (again.latest(), again.best()) == (7, 4)
    assert sorted(int(path.name) for path in again.directory.iterdir()) == [4, 6, 7]


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([(0.5, 2.0), (0.5, 1.0), (0.5, 1.5)], 2),
        ([(0.5, 1.0), (0.5, 1.0), (0.4, 0.5)], 2),
        ([(0.6, 2.0), (0.5, 1.0)], 1),
        ([(0.5, None), (0.5, 1.0)], 2),
    ],
    ids=["lower loss", "later step", "metric", "early versions kept no loss"],
)
def test_ties_of_the_metric_are_broken_by_the_loss_and_the_step(checkpointer, monkeypatch, scores, best):
    options = {"keep": 1, "metric": "accuracy", "higher_is_better": True}
    checkpoints = checkpointer(**options)
    for step, (accuracy, loss) in enumerate(scores, 1):
        with monkeypatch.context() as patch:
            if loss is None:
                patch.setattr(ScoreOrder, "stored", lambda self, scores: {"heldout_accuracy": scores["accuracy"]})
            checkpoints.save(state_at(step), DATA, PROGRESS, {"accuracy": accuracy, "loss": loss})
        checkpoints.wait()
    again = checkpointer(**options)
    assert again.best() == best
    assert sorted(int(path.name) for path in again.directory.iterdir()) == sorted({best, len(scores)})


def test_restoring_an_absent_step_raises(checkpointer):
    raises(r"no checkpoint .*there: none.*train first", lambda: checkpointer().restore(shapes()))
    save(checkpointer(), 3)
    raises(r"no checkpoint 4 .*there: 3", lambda: checkpointer().restore(shapes(), 4))


# --- Damage: one directory with two checkpoints, copied for each case ---


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    checkpoints = Checkpointer(root)
    save(checkpoints, 5, 9)
    checkpoints.close()
    return root


@pytest.fixture
def damaged(two, tmp_path):
    """Directory of checkpoint 9, the newest one, in a copy of `two`."""
    shutil.copytree(two, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "9"


def content(item):
    """The file that holds the arrays of an item, or its JSON."""
    return item / "metadata" if (item / "metadata").exists() else next((item / "d").iterdir())


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def remove(path):
    path.unlink()


@pytest.mark.parametrize(("item", "damage"), [("params", cut), ("rest", flip), ("data", remove), ("record", cut)])
def test_damage_raises_and_the_earlier_checkpoint_is_intact(damaged, checkpointer, capsys, item, damage):
    path = content(damaged / item)
    damage(path)
    with pytest.raises(InputError) as caught:
        checkpointer().restore(shapes())
    message = str(caught.value)
    assert "checkpoint 9 cannot be read" in message
    assert f"delete {damaged}, and the run goes on from step 5" in message
    assert "Traceback" not in capsys.readouterr().err
    shutil.rmtree(damaged)
    assert_same_bits(checkpointer().restore(shapes())[0], state_at(5))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut, flip, remove])
def test_damage_of_any_file_raises_or_is_harmless(two, tmp_path, damage):
    """Restoring is exact or raises, whichever file is damaged."""
    names = sorted(path.relative_to(two) for path in (two / "checkpoints" / "9").rglob("*") if path.is_file())
    refused = []
    for name in names:
        shutil.copytree(two, tmp_path / "run")
        damage(tmp_path / "run" / name)
        checkpoints = Checkpointer(tmp_path / "run")
        try:
            if checkpoints.latest() == 9:
                state, data, progress = checkpoints.restore(shapes())
                assert_same_bits(state, state_at(9))
                assert data == DATA and progress == PROGRESS, name
        except InputError:
            refused.append(name)
        finally:
            checkpoints.close()
            shutil.rmtree(tmp_path / "run")
    assert len(refused) >= 7  # of each item, the file that lists it and the file that holds it


def test_damage_of_the_only_checkpoint_raises(damaged, checkpointer):
    shutil.rmtree(damaged.parent / "5")
    cut(content(damaged / "params"))
    raises(f"delete {damaged}, and the run starts anew", lambda: checkpointer().restore(shapes()))


def test_unfinished_checkpoint_is_never_listed(damaged, checkpointer):
    """A kill in the middle of a save leaves such a checkpoint."""
    damaged.rename(damaged.with_name("9.orbax-checkpoint-tmp"))
    checkpoints = checkpointer()
    assert checkpoints.latest() == 5
    assert_same_bits(checkpoints.restore(shapes())[0], state_at(5))
    save(checkpoints, 9)
    assert_same_bits(checkpointer().restore(shapes())[0], state_at(9))


def test_read_only_keeps_unfinished_checkpoints(damaged):
    """A process that trains may be writing it."""
    unfinished = damaged.rename(damaged.with_name("9.orbax-checkpoint-tmp"))
    checkpoints = Checkpointer(damaged.parents[1], read_only=True)
    assert checkpoints.latest() == 5
    assert_same_bits(checkpoints.restore_params(shapes()), state_at(5).ema)
    checkpoints.close()
    assert unfinished.exists()


def test_other_format_raises(damaged, checkpointer):
    path = content(damaged / "record")
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"format": FORMAT + 1}))
    with pytest.raises(
        InputError, match=f"checkpoint 9 in .* has format {FORMAT + 1}, this version reads {FORMAT}: use"
    ):
        checkpointer().restore(shapes())


def test_other_shapes_and_dtypes_raise(two, damaged, checkpointer):
    wider = jax.tree.map(lambda leaf: leaf, shapes())
    wider.params["layers"]["kernel"] = jax.ShapeDtypeStruct(
        (3, 16, 32), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec())
    )
    raises(r"does not fit this config: params\['layers'\]\['kernel'\] was saved", lambda: checkpointer().restore(wider))
    narrower = jax.tree.map(lambda leaf: leaf, shapes())
    narrower.params["scale"] = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec()))
    raises(r"params\['scale'\] was saved as bfloat16\[8\], expected", lambda: checkpointer().restore(narrower))


@pytest.mark.parametrize("name", ["[proj]", "a[b", "a*", "a?", "back\\slash", "gs:", "\udcff"])
def test_paths_that_libraries_do_not_take_literally_raise(tmp_path, name):
    for workdir in (tmp_path / name / "run", tmp_path / name):
        for options in ({}, {"read_only": True}):
            with pytest.raises(InputError, match=r"rename that directory, or choose another one") as caught:
                Checkpointer(workdir, **options)
            assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_unusual_literal_paths_work(tmp_path):
    directory = tmp_path / "a b]é%2F{x}~$HOME#'\"&;" / "gs:x"
    checkpoints = Checkpointer(directory)
    save(checkpoints, 7)
    checkpoints.check_saved(7, shapes().params, shapes().step)
    assert_same_bits(checkpoints.restore(shapes())[0], state_at(7))
    checkpoints.close()


@pytest.mark.parametrize(("item", "damage"), [("params", remove), ("rest", cut), ("record", cut)])
def test_unreadable_saved_checkpoint_raises(damaged, checkpointer, item, damage):
    checkpoints = checkpointer()
    checkpoints.check_saved(9, shapes().params, shapes().step)
    files = [damaged / item / "manifest.ocdbt"] if item != "record" else [content(damaged / item)]
    for path in files:
        damage(path)
    raises("9 was written to .* cannot be read", lambda: checkpoints.check_saved(9, shapes().params, shapes().step))
    shutil.rmtree(damaged)
    raises(r"cannot be read back .*no checkpoint 9", lambda: checkpoints.check_saved(9, shapes().params, shapes().step))


def test_read_only_creates_nothing(tmp_path):
    checkpoints = Checkpointer(tmp_path / "run", read_only=True)
    assert checkpoints.latest() is None and checkpoints.best() is None
    checkpoints.close()
    assert not (tmp_path / "run").exists()


def test_uncreatable_directory_raises(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file")
    with pytest.raises(InputError, match="cannot open .*checkpoints.*: check the path") as caught:
        Checkpointer(tmp_path / "run")
    assert "intact" not in str(caught.value)  # there are none


def test_disk_errors_mention_earlier_checkpoints_if_there_are_any(checkpointer):
    checkpoints = checkpointer()
    for intact in (False, True):
        with pytest.raises(TemporaryError) as caught, checkpoints._disk("save to"):
            raise OSError("No space left on device")
        assert ("; earlier checkpoints are intact: free some space" in str(caught.value)) == intact
        save(checkpoints, 3 + intact)


@pytest.mark.parametrize(
    "record",
    [
        [1],
        {"progress": None},
        {"progress": PROGRESS | {"seconds": {"step": "0.1"}}},
    ],
)
def test_records_with_other_values_are_damaged(damaged, checkpointer, record):
    path = content(damaged / "record")
    path.write_text(json.dumps(json.loads(path.read_text()) | record if isinstance(record, dict) else record))
    raises(r"checkpoint 9 cannot be read .*, and the run", lambda: checkpointer().restore(shapes()))
