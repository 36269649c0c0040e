"""Failures as one job sees them: when it has its nodes, from traces or from distributions."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cnr_jax.errors import OptionError
from cnr_jax.goodput.profile import check_integers, check_numbers

HOUR_SECS = 3600.0
# How long nodes have run when a drawn trace begins, in mean times between failures.
_EARLIER = 10
_MANY = 400
_MOST_DRAWS = 2_000_000
_LEAST_SHAPE = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Failures:
    """Failures as one job sees them: when it can run, and when it loses a node.

    Attributes:
        name: name of the trace or of the distribution.
        up: stretches of time in which the job has all its nodes, as pairs of begin and end in
            seconds, in order. Each ends by a failure, unless it ends with the trace.
        secs: length of the trace, in seconds.
        nodes: number of nodes that the job needs.

    Example:
        >>> Failures.of_nodes("mine", [0, 60, 90, 200, 300], [4, 3, 4, 4, 4]).up
        ((0.0, 60.0), (90.0, 300.0))
    """

    name: str
    up: tuple[tuple[float, float], ...]
    secs: float
    nodes: int = 1

    @property
    def count(self) -> int:
        """Number of failures."""
        return sum(end < self.secs for _, end in self.up)

    @property
    def up_secs(self) -> float:
        """Seconds in which the job has all its nodes."""
        return sum(end - begin for begin, end in self.up)

    @property
    def mtbf_secs(self) -> float:
        """Mean seconds between failures while the job has its nodes; infinite without any."""
        return self.up_secs / self.count if self.count else math.inf

    @classmethod
    def of_nodes(
        cls,
        name: str,
        secs: Iterable[float],
        nodes: Iterable[float],
        needed: int | None = None,
    ) -> Failures:
        """Failures from the number of nodes that are up, as it changes over time.

        A node that goes and comes back between two times is not seen.

        Args:
            name: name of the trace.
            secs: times in seconds, in rising order; the last one ends the trace.
            nodes: number of nodes that are up from each time on.
            needed: number of nodes that the job needs; None: the most that are up at a time.

        Raises:
            OptionError: if times do not rise, or the job never has its nodes.
        """
        times = [float(each) for each in secs]
        counts = [float(each) for each in nodes]
        if len(times) != len(counts) or len(times) < 2:
            raise OptionError(
                f"trace {name!r} has {len(times)} times and {len(counts)} numbers of nodes,"
                " expected as many of both, two or more"
            )
        if not all(a < b for a, b in itertools.pairwise(times)) or not math.isfinite(
            times[-1] - times[0]
        ):
            raise OptionError(f"the times of trace {name!r} do not rise")
        least = max(counts) if needed is None else needed
        up: list[tuple[float, float]] = []
        for i, (begin, end) in enumerate(itertools.pairwise(times)):
            if counts[i] < least or not counts[i] > 0:
                continue
            begin, end = begin - times[0], end - times[0]
            if up and up[-1][1] == begin:
                begin = up.pop()[0]
            up.append((begin, end))
        if not up:
            raise OptionError(
                f"trace {name!r} never has the {least:g} nodes that the job needs\n"
                f"  got {max(counts):g} at most"
            )
        return cls(name, tuple(up), times[-1] - times[0], int(least))

    @classmethod
    def drawn(
        cls,
        *,
        node_mtbf_hours: float,
        nodes: int = 1,
        hours: float = 720.0,
        shape: float = 1.0,
        down_secs: float = 0.0,
        seed: int = 0,
    ) -> Failures:
        """Failures drawn from a Weibull distribution, for each node by itself.

        A failed node is replaced by a new one, while the others grow older. The nodes have run for
        a long time when the trace begins.

        Args:
            node_mtbf_hours: mean hours between failures of one node.
            nodes: number of nodes that the job needs; the failure of any of them ends it.
            hours: length of the trace, in hours.
            shape: shape of the distribution. 1 is the exponential one. 0.7 to 0.8 were published
                for nodes of clusters: the longer a node has run, the more seldom it fails.
            down_secs: seconds until a failed node is replaced.
            seed: number that makes the draws repeatable.

        Raises:
            OptionError: if a number is not positive, `shape` is below 0.1, or the draws would be
                too many.

        Source: Schroeder and Gibson, A large-scale study of failures in high-performance
        computing systems (DSN'06): Weibull, shape 0.7 to 0.8.
        """
        check_numbers(down_secs=down_secs)
        check_numbers(
            above=True,
            node_mtbf_hours=node_mtbf_hours,
            nodes=nodes,
            hours=hours,
            shape=shape,
        )
        check_integers(nodes=nodes, seed=seed)
        if shape < _LEAST_SHAPE:
            raise OptionError(
                f"shape is {shape!r}, expected {_LEAST_SHAPE} or more\n"
                "  hint: 0.7 to 0.8 were found for nodes of clusters"
            )
        mtbf, secs = float(node_mtbf_hours) * HOUR_SECS, float(hours) * HOUR_SECS
        earlier, rng = _EARLIER * mtbf, np.random.default_rng(seed)
        mean = (earlier + secs) / mtbf
        draws = int(mean + 10 * math.sqrt(mean) / shape) + 1
        if draws * nodes > _MOST_DRAWS:
            raise OptionError(
                f"{draws * nodes:,} failures would be drawn, expected {_MOST_DRAWS:,} at most\n"
                "  hint: fewer hours, or more of them between failures"
            )
        # By the inverse of the distribution: numpy's own draws of it may change with its version.
        lives = (-np.log1p(-rng.random((nodes, draws)))) ** (1 / shape)
        lives *= mtbf / math.gamma(1 + 1 / shape)
        times = np.cumsum(lives, axis=1) - earlier
        found = np.sort(times[(times > 0) & (times < secs)])
        begins = np.concatenate([[0.0], found + down_secs])
        ends = np.concatenate([found, [secs]])
        up = [(float(a), float(b)) for a, b in zip(begins, ends, strict=True) if a < b]
        kind = "exponential" if shape == 1 else f"Weibull, shape {shape:g}"
        of = f" x {nodes} nodes" if nodes > 1 else ""
        return cls(f"{kind}, {node_mtbf_hours:g} h{of}", tuple(up), secs, nodes)


def failures_from(
    text: str, nodes: int | None = None, hours: float | None = 720.0, seed: int = 0
) -> Failures:
    """Failures as a command line names them: the path of a trace, or a distribution.

    Args:
        text: path of a file, as `read_failures` reads it; or `exponential:HOURS` or
            `weibull:HOURS,SHAPE`, with the mean hours between failures of one node.
        nodes: number of nodes that the job needs; None: for a trace, the most that are up at a
            time; for a distribution one.
        hours: hours to draw failures for; None: as many as bring some hundreds of them.
        seed: number that makes the draws repeatable.

    Raises:
        OptionError: as `read_failures` and `Failures.drawn`, or if a distribution has other
            numbers.
    """
    kind, _, given = text.partition(":")
    numbers = {"exponential": 1, "weibull": 2}.get(kind)
    if numbers is None:
        return read_failures(text, nodes)
    try:
        mtbf, *shape = map(float, given.split(","))
        if len(shape) != numbers - 1:
            raise ValueError
    except ValueError:
        raise OptionError(
            f"{text!r} is no distribution of failures\n"
            "  expected exponential:HOURS or weibull:HOURS,SHAPE, such as weibull:4000,0.7"
        ) from None
    nodes = 1 if nodes is None else nodes
    check_numbers(above=True, nodes=nodes)
    return Failures.drawn(
        node_mtbf_hours=mtbf,
        nodes=nodes,
        hours=_MANY * mtbf / nodes if hours is None else hours,
        shape=shape[0] if shape else 1.0,
        seed=seed,
    )


def read_failures(path: str | os.PathLike[str], nodes: int | None = None) -> Failures:
    """Reads a trace of failures: the number of nodes that are up, as it changes over time.

    A CSV file has two columns below a header: seconds, and the number of nodes that are up from
    then on. A JSON file has both as lists, `{"secs": [0, 60], "nodes": [4, 3]}`, or samples at
    equal distances, `{"metadata": {"gap_seconds": 300}, "data": [4, 3]}`, as published traces of
    preempted machines do.

    Args:
        path: path of the file; JSON if its name ends in `.json`, else CSV.
        nodes: number of nodes that the job needs; None: the most that are up at a time.

    Raises:
        OptionError: if there is no such file, it is in neither form, or the job never has its
            nodes.
    """
    file = Path(path)
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError as error:
        raise OptionError(
            f"there is no trace of failures {file}\n"
            "  hint: the path of one, or exponential:HOURS or weibull:HOURS,SHAPE"
        ) from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{file} is no trace of failures: it is no text") from error
    read = _from_json if file.suffix == ".json" else _from_csv
    try:
        secs, counts = read(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OptionError(
            f"{file} is no trace of failures\n  {type(error).__name__}: {error}\n"
            '  hint: CSV of secs,nodes below a header, or JSON {"secs": [...], "nodes": [...]}'
        ) from error
    return Failures.of_nodes(file.stem, secs, counts, nodes)


def _from_csv(text: str) -> tuple[list[float], list[float]]:
    lines = [row for row in csv.reader(text.splitlines()) if row]
    if not lines:
        raise ValueError("it is empty")
    head, *rows = lines
    try:
        float(head[0])
    except ValueError:
        pass
    else:
        raise ValueError(f"its first row is no header, got {','.join(head)}")
    pairs = [(float(secs), float(nodes)) for secs, nodes in rows]
    return [secs for secs, _ in pairs], [nodes for _, nodes in pairs]


def _from_json(text: str) -> tuple[list[float], list[float]]:
    document: Any = json.loads(text)
    if "data" not in document:
        return list(map(float, document["secs"])), list(map(float, document["nodes"]))
    gap, data = float(document["metadata"]["gap_seconds"]), document["data"]
    # The last sample lasts as long as the others.
    return [gap * i for i in range(len(data) + 1)], [*map(float, data), 0.0]
