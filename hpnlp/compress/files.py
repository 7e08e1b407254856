"""Weights of a model in one safetensors file: the arrays, and the kind of each `Weight` in its header."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.compress import container
from hpnlp.ops import weights as kinds
from hpnlp.ops.weight import Weight, is_weight
from hpnlp.types import InputError

# The kinds of weights that a file may hold, by name.
KINDS: dict[str, type[Weight]] = {
    name: value for name in kinds.__all__ if isinstance(value := getattr(kinds, name), type) and value is not Weight
}


def stages_of(node: Any) -> set[str]:
    """Stages of recipes that make weights such as one of a model.

    Args:
      node: An array or a Weight.

    Returns:
      Names of stages, such as "int8"; those of a product of factors and those of the factors; none for an array.
    """
    return node.stages if is_weight(node) else set()


def takes_signs(params: Any) -> bool:
    """Whether products with some weights of a model take the signs of their inputs, so that the matrices alone are no model.

    Args:
      params: A tree of arrays and Weights.

    Returns:
      True where a weight declares it.
    """
    return any(x.takes_signs for x in jax.tree.leaves(params, is_leaf=is_weight) if is_weight(x))


def write_weights(
    path: str | os.PathLike[str],
    params: Any,
    metadata: Any = None,
    encoding: Callable[[str, np.ndarray], str] = lambda name, array: "raw",
) -> None:
    """Writes the weights of a model, atomically.

    Args:
      path: The file.
      params: A tree of dicts and tuples of arrays and Weights. Empty dicts are left out.
      metadata: Further content of the header, which JSON can express.
      encoding: A function of the name and the content of an array that returns its encoding, see `container.write`.

    Raises:
      InputError: A Weight is of no kind in KINDS, a name has a "/", or a tuple has an empty entry or is the whole tree.
    """
    leaves, header = file_content(params, metadata)
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    encodings = {name: encoding(name, array) for name, array in arrays.items()}
    container.write(path, container.nested(arrays), header, encodings=encodings)


def file_content(params: Any, metadata: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays and the header of a file of weights.

    Args:
      params: A tree of dicts and tuples of arrays, or shapes of arrays, and Weights of these.
      metadata: Further content of the header.

    Returns:
      `(arrays by name, header)`.

    Raises:
      InputError: As `write_weights`.
    """
    arrays: dict[str, Any] = {}
    described: dict[str, Any] = {}

    def add(name: str, node: Any) -> None:
        if not is_weight(node):
            arrays[name] = node
            return
        described[name] = {"kind": _kind_of(node), **_static_fields(node)}
        for field in _array_fields(node):
            add(f"{name}/{field}", getattr(node, field))

    for name, node in _named(params):
        add(name, node)
    return arrays, {"weights": described, "tuples": _tuples(params), "metadata": metadata}


def read_weights(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Reads the weights of a model.

    Args:
      path: A file of `write_weights`.

    Returns:
      `(params, metadata)`, as they were written; arrays are jax arrays.

    Raises:
      InputError: The file is damaged, or has a kind of weight that this version does not know.
    """
    file = container.Container(path)
    flat = {name: jnp.asarray(array) for name, array in file.arrays().items()}
    return _assembled(path, flat, file.metadata)


def read_outline(path: str | os.PathLike[str]) -> Any:
    """Reads the shapes of the weights of a model, from the header of its file.

    Args:
      path: A file of `write_weights`.

    Returns:
      The tree of `read_weights`, with a `jax.ShapeDtypeStruct` in place of each array.

    Raises:
      InputError: As `read_weights`.
    """
    file = container.Container(path)
    flat = {name: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for name, entry in file.entries.items()}
    return _assembled(path, flat, file.metadata)[0]


def _assembled(path: str | os.PathLike[str], arrays: Mapping[str, Any], header: Any) -> tuple[Any, Any]:
    """`(params, metadata)` of arrays, or of their shapes, by the header, which may be of any type in a foreign file."""
    try:
        return _tree_of(path, arrays, header), header["metadata"]
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} is a container, but its header does not describe the weights of a model ({error!r:.80}): pass a file that "
            "hpnlp compress wrote, or read it with hpnlp.compress.container.read"
        ) from error


def _tree_of(path: str | os.PathLike[str], arrays: Mapping[str, Any], header: Any) -> Any:
    """The tree with the Weights that the header describes. Raises any error where the header is not that of `file_content`."""
    flat: dict[str, Any] = dict(arrays)
    # Innermost first: a part of a Weight may be a Weight itself.
    for name, fields in sorted(header["weights"].items(), key=lambda item: -item[0].count("/")):
        kind = KINDS.get(fields["kind"])
        if kind is None:
            raise InputError(f"{path}: {name} is a weight of kind {fields['kind']!r}: read it with a newer hpnlp")
        prefix = f"{name}/"
        parts = {key.removeprefix(prefix): flat.pop(key) for key in list(flat) if key.startswith(prefix)}
        flat[name] = kind(**parts, **{key: value for key, value in fields.items() if key != "kind"})
    tree = container.nested(flat)
    for name in sorted(header["tuples"], key=len, reverse=True):
        _replace(tree, name.split("/"), lambda node: tuple(node[str(i)] for i in range(len(node))))
    return tree


SPARSE_SHARE = 0.5  # integers with a larger share of zeros are stored by their non-zeros


def encoding_of(name: str, array: np.ndarray) -> str:
    """The encoding of an array in the file of a compressed run.

    Args:
      name: Name of the array.
      array: Its content.

    Returns:
      As `container.write` takes it: packed for integers of 4 bits, the non-zeros of arrays with zeros where that is smaller,
      with Huffman codes of these if many are equal, Huffman codes for other integers of 8 bits, and "raw" for all others.
    """
    if array.dtype.name in ("int4", "uint4"):
        return "packed(4)"
    zeros, bits = np.count_nonzero(array == 0) if array.size > 1024 else 0, 8 * array.dtype.itemsize
    # A Huffman code has at least one bit for each element, also where nearly all are zero.
    if array.dtype.name in ("int8", "uint8"):
        return "sparse" if zeros > SPARSE_SHARE * array.size else "huffman"
    # A block of non-zeros has at most one bit for each element beside them, and its headers.
    if array.dtype.kind == "b" or bits * zeros <= 1.1 * array.size + 2000:
        return "raw"
    distinct, others = len(np.unique(array)), array.size - zeros
    coded = bits * distinct + others * np.log2(distinct)
    return "sparse" if distinct <= 2**16 and coded <= bits * max(others, 1) else "nonzeros"


def stored_bytes(params: Any) -> int:
    """Memory of weights.

    Args:
      params: A tree of arrays and Weights.

    Returns:
      Bytes of all arrays; integers of 4 bits count half a byte, as accelerators and files keep them.
    """
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(params))


def _bytes(array: Any) -> int:
    bits = 4 if jnp.dtype(array.dtype).name in ("int4", "uint4") else 8 * jnp.dtype(array.dtype).itemsize
    return -(-int(np.prod(array.shape)) * bits // 8)


def _named(params: Any) -> list[tuple[str, Any]]:
    """(name, array or Weight) of all nodes."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    return [("/".join(_key(key) for key in path), node) for path, node in leaves]


def _key(key: Any) -> str:
    name = jax.tree_util.keystr((key,), simple=True)
    if "/" in name:
        raise InputError(f"the weights have the name {name!r}: expected names without '/'; nest dicts instead")
    return name


def _tuples(params: Any, prefix: str = "") -> list[str]:
    """Names of the nodes that are tuples, as the layers of a model whose parameters are separate."""
    if is_weight(params):
        return []
    if isinstance(params, tuple):
        if not (prefix and params and all(map(jax.tree.leaves, params))):
            raise InputError(
                f"the tuple {prefix or 'of all weights'} cannot be written: expected tuples in a dict, with weights "
                "in each entry"
            )
        children = {str(i): child for i, child in enumerate(params)}
    else:
        children = params if isinstance(params, Mapping) else {}
    found = [prefix] if isinstance(params, tuple) else []
    return found + [name for key, child in children.items() for name in _tuples(child, f"{prefix}/{key}".lstrip("/"))]


def _replace(tree: dict[str, Any], names: list[str], function: Callable[[Any], Any]) -> None:
    *parents, last = names
    for parent in parents:
        tree = tree[parent]
    tree[last] = function(tree[last])


def _kind_of(node: Weight) -> str:
    name = type(node).__name__
    if KINDS.get(name) is not type(node):
        raise InputError(f"a weight of kind {name} cannot be written: expected {', '.join(KINDS)}")
    return name


def _array_fields(node: Any) -> list[str]:
    fields = (f.name for f in dataclasses.fields(node) if not f.metadata.get("static"))
    return [name for name in fields if getattr(node, name) is not None]  # None is the default of optional arrays


def _static_fields(node: Any) -> dict[str, Any]:
    return {f.name: getattr(node, f.name) for f in dataclasses.fields(node) if f.metadata.get("static")}
