"""A Model that wraps another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxtyping import Array, PyTree

from hpnlp.types import LossOut, Statistics

if TYPE_CHECKING:
    from hpnlp.parallel.layout import Layout


@dataclasses.dataclass(frozen=True)
class ModelWrapper:
    """A Model with all members of the Model `inner`, of which a subclass changes some.

    The members of `hpnlp.types.Model` are written out, because checks of a protocol read the class; further ones, such as
    `stats`, are those of `inner`.

    Attributes:
      inner: The Model.
    """

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def config(self) -> Any:
        """The Model's config."""
        return self.inner.config

    @property
    def model_parallel(self) -> Any:
        """The Model's division over devices."""
        return self.inner.model_parallel

    @property
    def remat(self) -> str:
        """The Model's rematerialisation policy."""
        return self.inner.remat

    @property
    def is_normalized(self) -> bool:
        """Whether the Model's losses are those of normalised probabilities."""
        return self.inner.is_normalized

    def clone(self, **fields: Any) -> Any:
        """Clones the Model with other values of its fields.

        Args:
          **fields: Fields of the Model with other values.

        Returns:
          The wrapped clone.
        """
        return dataclasses.replace(self, inner=self.inner.clone(**fields))

    def init(self, rngs: PyTree[Array], *args: Any, **kwargs: Any) -> Any:
        """Initialises the variables of the Model."""
        return self.inner.init(rngs, *args, **kwargs)

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the Model."""
        return self.inner.apply(variables, *args, **kwargs)

    def loss(self, batch: Mapping[str, Array], deterministic: bool = True) -> LossOut:
        """Raises TypeError: the loss is called by `apply`."""
        raise TypeError("call apply(variables, batch, method='loss')")

    def example_batch(self, batch_size: int, length: int) -> dict[str, Array]:
        """An example batch of the Model."""
        return self.inner.example_batch(batch_size, length)

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the Model's batches."""
        return self.inner.batch_axes()

    def rows(self, batch: Mapping[str, Array]) -> Any:
        """Rows of tables that the Model reads."""
        return self.inner.rows(batch)

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, Array]:
        """Auxiliary losses of the Model."""
        return self.inner.auxiliary_loss(statistics)

    def advance(self, buffers: PyTree, statistics: Statistics, step: Array, rng: Array) -> Any:
        """The next buffers of the Model."""
        return self.inner.advance(buffers, statistics, step, rng)

    def initial_carry(self, batch_size: int) -> Any:
        """The carry of the Model before the first batch; None for a Model without one."""
        return self.inner.initial_carry(batch_size)

    def carry_axes(self) -> Any:
        """Logical axes of the Model's carry."""
        return self.inner.carry_axes()

    @property
    def training_arrays(self) -> tuple[str, ...]:
        """Arrays of a batch that only training reads."""
        return self.inner.training_arrays

    @property
    def changes_weights(self) -> bool:
        """Whether the weights that the Model applies are others than its parameters."""
        return self.inner.changes_weights

    def check_layout(self, layout: Layout) -> None:
        """Checks that the Model is trained on a layout over devices.

        Args:
          layout: A `parallel.layout.Layout`.

        Raises:
          InputError: It is not.
        """
        self.inner.check_layout(layout)

    def allowed_updates(self, params: PyTree, updates: PyTree, rate: Array) -> Any:
        """Updates of the parameters as the Model requires.

        Args:
          params: Parameters before the update.
          updates: A tree like `params`.
          rate: Learning rate of the step, float32 [].

        Returns:
          The updates.
        """
        return self.inner.allowed_updates(params, updates, rate)

    def plain(self, weights: Mapping[str, Any]) -> tuple[Any, Any]:
        """The Model that is used.

        Args:
          weights: Weights of this model.

        Returns:
          This model and its weights; a subclass that is trained in another form returns the Model that is used.
        """
        return self, weights
