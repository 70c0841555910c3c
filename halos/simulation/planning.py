"""From what is asked for to experiments, each whole and checked before the first begins."""

from __future__ import annotations

from collections.abc import Sequence

from halos.errors import UserError
from halos.runtime.prepare import PreparedData, prepare_data, prepare_model
from halos.simulation.environment import Environment
from halos.simulation.experiment import Experiment, check
from halos.simulation.laboratory import specification_of
from halos.simulation.methods import Method
from halos.specification import RunSpecification
from halos.training.corpus import Progress

LOCAL_STEPS = 6144  # of all workers together, unless the user or a specification says otherwise
WINDOW_STEPS = 500  # local steps of the fastest worker, which a timeline shows


def window_s(environment: Environment) -> float:
    return WINDOW_STEPS * environment.step_ms / 1e3


def timing_only(
    environment: Environment,
    method: Method,
    seed: int,
    *,
    local_steps: int | None,
    hours: float | None,
) -> Experiment:
    """Time alone; to the end of the steps or the hours, or of ``LOCAL_STEPS`` without either."""
    if local_steps is None and hours is None:
        local_steps = LOCAL_STEPS
    return Experiment(
        environment=environment,
        method=method,
        seed=seed,
        local_steps=local_steps,
        hours=hours,
        window_s=window_s(environment),
    )


class Training:
    """What real training shares, whatever the method and the seed.

    ``own``: model, data and inner optimizer of a run of the user's; by default the built-in ones.
    Raises ``UserError`` for what cannot be had; ``progress`` hears of data that is being made.
    """

    def __init__(
        self,
        environment: Environment,
        own: RunSpecification | None,
        *,
        local_steps: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.environment, self._own = environment, own
        if own is None and local_steps is None:
            local_steps = LOCAL_STEPS
        self._steps_asked = local_steps
        specification = self._specification(0)
        self.data: PreparedData = prepare_data(specification, progress)
        if self.data.dataset is None:
            raise UserError(
                '[data] dataset: is "own", which only a training loop of your own has; simulate '
                "with --timing-only, or name data that halos can read"
            )
        prepare_model(specification)
        specification.inner_for(self.data.samples)
        samples = specification.total_samples(self.data.samples)
        self.local_steps = max(1, samples // specification.training.batch_size)

    def experiments(self, methods: Sequence[Method], seeds: Sequence[int]) -> list[Experiment]:
        """Seed by seed, so that an early end has as many methods as possible to compare."""
        return [self.experiment(method, seed) for seed in seeds for method in methods]

    def experiment(self, method: Method, seed: int, hours: float | None = None) -> Experiment:
        """To the end of the steps, or for so many virtual hours, if these are over sooner."""
        check(self.environment, method)
        return Experiment(
            environment=self.environment,
            method=method,
            seed=seed,
            specification=self._specification(seed),
            local_steps=self.local_steps,
            hours=hours,
            window_s=window_s(self.environment),
        )

    def _specification(self, seed: int) -> RunSpecification:
        return specification_of(
            self.environment, self._own, seed=seed, local_steps=self._steps_asked
        )
