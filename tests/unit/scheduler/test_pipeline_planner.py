"""The planner against brute force over every cut, replica count and recomputation; plans and their files."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.layout import Samples, Tiles
from scheduler.ir.link import Cluster, Level, Link
from scheduler.ir.profile import Border, Layer, Profile
from scheduler.pipelines import generate
from scheduler.pipelines.build import program_of
from scheduler.pipelines.partition import PartitionInput, StageSearch, partition
from scheduler.simulate.costs import memory_by_rank
from scheduler.simulate.simulator import simulate
from scheduler.validate import validate

SCHEDULES = [("pipedream", 1), ("pipedream", 2), ("2bw", 3), ("1f1b", 4), ("gpipe", 2)]
FOLDED = [("wpipe", 4, {}), ("interleaved", 4, {}), ("interleaved", 4, {"virtual": 3})]


def model(layers: int, seed: int = 0) -> Profile:
    random = np.random.default_rng(seed)
    return Profile(
        f"random{seed}",
        tuple(
            Layer(
                f"layer{number}",
                forward=float(random.uniform(1, 5)),
                backward=float(random.uniform(2, 9)),
                bytes=int(random.integers(0, 40)),
                activation_bytes=int(random.integers(1, 30)),
                fixed=float(random.uniform(0, 0.6)),
                rs_share=float(random.choice([0.5, 1.0, 2.0])),
                grad_share=float(random.choice([1.0, 2.0])),
            )
            for number in range(layers)
        ),
        update_per_byte=0.01,
        traffic_per_byte=0.02,
    )


def two_levels(memory: tuple[int, ...] | None = None) -> Cluster:
    return Cluster((Level(2, 0.1, 0.02), Level(2, 0.5, 0.15)), memory)


def least_bottleneck(
    profile: Profile, cluster: Cluster, schedule: str, count: int, modes: tuple[bool, ...], state: float
) -> float:
    """By trying everything; written from the planner's description, not from its arrays."""
    layers, best = profile.layers, math.inf
    most = 2 if schedule == "bundle" else cluster.size
    for stages in range(1, min(len(layers), most) + 1):
        for inner in combinations(range(1, len(layers)), stages - 1):
            cuts = [0, *inner, len(layers)]
            for replicas in product(range(1, cluster.size + 1), repeat=stages):
                if sum(replicas) > cluster.size:
                    continue
                device = cluster.size - sum(replicas)
                slowest = 0.0
                for stage in range(stages):
                    slowest = max(
                        slowest,
                        min(
                            stage_time(
                                profile, cluster, schedule, count, state, cuts, stage, stages - stage, device,
                                replicas[stage], again,
                            )
                            for again in modes
                        ),
                    )  # fmt: skip
                    device += replicas[stage]
                best = min(best, slowest)
    return best


def stage_time(
    profile: Profile,
    cluster: Cluster,
    schedule: str,
    count: int,
    state: float,
    cuts: list[int],
    stage: int,
    from_end: int,
    device: int,
    replicas: int,
    again: bool,
) -> float:
    layers = profile.layers[cuts[stage] : cuts[stage + 1]]
    size = sum(layer.bytes for layer in layers)
    activations = sum(layer.activation_bytes for layer in layers)
    inputs = profile.layers[cuts[stage] - 1].activation_bytes if stage else 0
    outputs = layers[-1].activation_bytes
    layout = generate(schedule, len(cuts) - 1, count).layout
    versions, in_flight = layout.versions[stage], layout.activations[stage]
    held = inputs * in_flight + activations if again else activations * in_flight
    limit = min(cluster.memory[device : device + replicas]) if cluster.memory else math.inf
    gradients = sum(layer.bytes * layer.grad_share for layer in layers)
    if size * (versions + state) + gradients + held / replicas > limit:
        return math.inf
    forward, backward = sum(la.forward for la in layers), sum(la.backward for la in layers)
    stays = sum(la.fixed * (la.forward + la.backward) for la in layers) / (forward + backward)
    part = stays + (1 - stays) / replicas
    seconds = count * (forward * (2 if again else 1) + backward) * part
    bundle = schedule == "bundle"  # whose replicas step whole parameters, and all-reduce
    seconds += profile.update_per_byte * size / (1 if bundle else replicas)
    exchanged = sum(layer.bytes * (layer.rs_share + (layer.rs_share if bundle else 1)) for layer in layers)
    seconds += profile.traffic_per_byte * exchanged * (replicas - 1) / replicas
    level = cluster.level(device, device + replicas - 1)
    sync = (replicas - 1) * (2 * level.alpha + level.beta * exchanged / replicas)
    if replicas == 4 and not bundle:  # both ranks of both hosts: two tiers at once, half the bytes in each
        sync = 2 * sum(tier.alpha for tier in cluster.levels)
        sync += max(tier.beta for tier in cluster.levels) * exchanged / 2
    seconds += max(0.0, sync - backward * part)
    crossings = [(inputs, device)] if stage else []
    crossings += [(outputs, device + replicas)] if from_end > 1 else []
    for crossing, border in crossings:
        wire = cluster.level(border - 1, border)
        seconds = max(seconds, count * (wire.alpha + wire.beta * crossing / replicas))
    return seconds


@pytest.mark.few
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("schedule", "count"), [*SCHEDULES, ("zero_bubble", 3), ("bundle", 1)])
def test_as_good_as_brute_force(schedule: str, count: int, seed: int) -> None:
    """Of a bundle, each replica makes the whole update, which the planner had divided among them."""
    profile = replace(model(4 + seed % 4, seed), update_per_byte=0.2)
    clusters = [Cluster.flat(3, Link(0.1, 0.05)), two_levels()]
    for cluster in clusters:
        found = PartitionInput(profile, cluster, schedule, count).search(9).best()
        assert found is not None
        wanted = least_bottleneck(profile, cluster, schedule, count, (False,), 0.0)
        assert found.bottleneck == pytest.approx(wanted, rel=1e-5)


@pytest.mark.few
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize(("schedule", "count"), SCHEDULES)
def test_as_good_as_brute_force_where_memory_is_short(schedule: str, count: int, seed: int) -> None:
    """Devices of different sizes, optimizer state, and recomputation where it helps."""
    profile = model(4 + seed % 3, seed)
    whole = sum(3 * layer.bytes + layer.activation_bytes for layer in profile.layers)
    for part in (0.3, 0.6, 1.0):
        cluster = two_levels(tuple(int(whole * part * share) for share in (1.0, 0.7, 1.3, 0.9)))
        for recompute, modes in (("never", (False,)), ("auto", (False, True)), ("always", (True,))):
            found = PartitionInput(profile, cluster, schedule, count, recompute, 1.0).search(9).best()
            wanted = least_bottleneck(profile, cluster, schedule, count, modes, 1.0)
            if found is None:
                assert wanted == math.inf
            else:
                assert found.bottleneck == pytest.approx(wanted, rel=1e-5)


def test_gradients_of_masters_take_their_own_memory() -> None:
    """Those of bfloat16 weights are float32. The planner and a plan's memory counted them in bfloat16."""
    half = Profile("half", tuple(Layer(str(n), 1.0, 2.0, 100, 10) for n in range(4)))
    whole = replace(half, layers=tuple(replace(layer, grad_share=2.0) for layer in half.layers))
    plans = [partition(each, Cluster.flat(2, Link(0.0, 0.0)), "1f1b", max_stages=1) for each in (half, whole)]
    assert [plan.memory[0] for plan in plans] == [820, 1220]  # replicas keep 20 bytes of activations
    with pytest.raises(ValueError, match="fits into the memory"):
        partition(whole, Cluster.flat(2, Link(0.0, 0.0), 900), "1f1b", max_stages=1)
    assert partition(half, Cluster.flat(2, Link(0.0, 0.0), 900), "1f1b", max_stages=1).memory == (820, 820)


def test_seven_layers_four_devices() -> None:
    profile = model(7, 11)
    found = PartitionInput(profile, two_levels(), "pipedream").search(9).best()
    assert found is not None
    wanted = least_bottleneck(profile, two_levels(), "pipedream", 1, (False,), 0.0)
    assert found.bottleneck == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("schedule", "count"), [*SCHEDULES, ("ashpipe", 1), ("1f1b", 1), ("2bw", 1)])
def test_counts_of_shallow_pipelines_are_those_of_the_end_of_deep_ones(schedule: str, count: int) -> None:
    """Which lets one search serve all depths."""
    deep = PartitionInput(model(9), Cluster.flat(9, Link(0.1, 0.05), 1), schedule, count)
    for stages in (1, 3, 5):
        for few, many in zip(deep.kept(stages), deep.kept(9), strict=True):
            assert few.tolist() == many[: stages + 1].tolist()


@pytest.mark.few
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("schedule", "count", "options"), FOLDED)
def test_several_stages_on_a_rank(
    schedule: str, count: int, options: dict[str, int], seed: int, short: bool
) -> None:
    """Never slower than layers cut evenly, with any number of positions and replicas; and within memory."""
    profile = model(7 + seed, seed)
    virtual = options.get("virtual", 2)
    memory = (200 if seed % 2 else 320,) * 4 if short else None
    cluster = two_levels(memory)
    naive = []
    for positions, replicas in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)):
        stages = positions * virtual
        if stages <= len(profile.layers):
            cuts = [stage * len(profile.layers) // stages for stage in range(stages)]
            program = generate(
                schedule, positions, count, replicas=replicas, profile=profile, cuts=cuts, **options
            )
            ranks = range(4 - positions * replicas, 4)
            if memory is None or max(memory_by_rank(program, profile)) <= memory[0]:
                naive.append(simulate(program, profile, cluster.at(ranks)).period)
    try:
        plan = partition(profile, cluster, schedule, microbatches=count, candidates=99, **options)
    except ValueError:
        assert short and not naive
        return
    program = program_of(plan, profile)
    validate(program, profile)
    assert memory is None or max(plan.memory) <= memory[0]
    assert plan.memory == memory_by_rank(program, profile)
    assert PipelinePlan.from_dict(plan.to_dict()) == plan
    assert plan.period <= min(naive, default=math.inf) * 1.0001


@pytest.mark.few
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "2bw"])
def test_cuts_for_placements_are_the_best(schedule: str, seed: int) -> None:
    """Stages on tiles: of all cuts, halos included. Searched without halos, 2bw's would be others."""
    profile, cluster = model(7, seed), Cluster.flat(6, Link(0.01, 0.005))
    placements = [Tiles((2, 2)), Samples(), Samples()]
    borders = [Border(300.0 / layer, 300.0 / layer, 0.3) for layer in range(1, 8)]
    plan = partition(profile, cluster, schedule, microbatches=3, placements=placements, borders=borders)
    validate(program_of(plan, profile), profile)
    assert plan.placements == placements and PipelinePlan.from_dict(plan.to_dict()) == plan
    periods = []
    for later in combinations(range(1, 7), 2):
        cuts = (0, *later)
        program = generate(schedule, 3, 3, placements=placements, profile=profile, cuts=cuts, borders=borders)
        periods.append(simulate(program, profile, cluster).period)
    assert plan.period == pytest.approx(min(periods), rel=1e-9)


def test_placements_take_all_devices() -> None:
    profile, cluster = model(7, 0), Cluster.flat(4, Link(0.01, 0.005))
    with pytest.raises(ValueError, match="they take 5 of 4 devices"):
        partition(profile, cluster, "1f1b", placements=[Tiles((2, 2)), Samples()])


def test_only_a_schedule_that_leaves_the_choice_takes_a_number_of_stages() -> None:
    with pytest.raises(ValueError, match="'wpipe' does not let virtual be chosen"):
        partition(model(8, 3), Cluster.flat(2, Link(0.1, 0.05)), "wpipe", virtual=4)


def test_schedules_of_a_few_positions() -> None:
    profile, cluster = model(8, 3), Cluster.flat(6, Link(0.1, 0.05))
    assert 1 <= len(partition(profile, cluster, "bundle").cuts) <= 2
    assert len(partition(profile, cluster, "wpipe", microbatches=3).replicas) <= 3


def test_plan_becomes_a_valid_program_within_its_memory() -> None:
    profile = model(6, 3)
    plan = partition(profile, two_levels((400,) * 4), "pipedream", recompute="auto")
    program = program_of(plan, profile)
    validate(program, profile)
    assert max(plan.memory) <= 400
    assert plan.ranks == program.ranks


def test_the_message_across_a_border_may_be_the_bottleneck() -> None:
    """A layer of 10 s on each of two devices, which one alone could not hold, and 40 s for what they send."""
    profile = Profile("wide", tuple(Layer(str(n), 4.0, 6.0, 100, 80) for n in range(2)))
    best = PartitionInput(profile, Cluster.flat(2, Link(0.0, 0.5), 400), "gpipe").search(2).best()
    assert best is not None and best.replicas == (1, 1) and best.bottleneck == 40


def test_the_state_of_several_stages_on_a_rank_counts() -> None:
    """A device holds both layers with their gradients and activations, and no optimizer state beside them."""
    profile = Profile("two", tuple(Layer(str(n), 4.0, 6.0, 100, 0) for n in range(2)))
    cluster = Cluster.flat(1, Link(0.0, 0.0), 450)
    assert partition(profile, cluster, "interleaved").memory == (400,)
    with pytest.raises(ValueError, match="fits into the memory"):
        partition(profile, cluster, "interleaved", state=1.0)


def test_replicas_on_hosts_exchange_in_two_tiers() -> None:
    """A flat ring puts 1.75 times the bytes on the hosts' links; with it half of the devices stayed idle."""
    profile = Profile("flat", tuple(Layer(str(n), 10.0, 20.0, 50, 1) for n in range(2)))
    cluster = Cluster((Level(4, 0.0, 0.0), Level(2, 0.0, 0.1)))
    plan = partition(profile, cluster, "1f1b", max_stages=1)
    # 8 ranks compute for 7.5 s; RS and AG put half of 100 bytes on each link, and the backward hides 5 s.
    assert plan.replicas == (8,) and plan.bottleneck == pytest.approx(7.5 + 2 * 5 - 5)
    assert partition(profile, cluster, "bundle", max_stages=1).replicas == (4,)


def test_heavy_weights_behind_light_layers_are_not_replicated() -> None:
    """The shape of AlexNet: convolutions with few weights in front, then layers of many weights. Data
    parallelism would move the weights; the planner replicates the front alone.
    """
    front = tuple(Layer(f"conv{n}", 10.0, 20.0, 10, 50) for n in range(4))
    rear = tuple(Layer(f"fc{n}", 2.0, 4.0, 5000, 5) for n in range(2))
    plan = partition(Profile("alex", front + rear), Cluster.flat(4, Link(0.0, 0.02)), "ashpipe")
    assert plan.replicas == (3, 1)
    assert plan.cuts == (0, 4)


def test_simulator_decides_between_depths() -> None:
    """By its bottleneck alone a deep 1F1B pipeline with one micro-batch looks as good as a shallow one; it is
    idle most of the time.
    """
    profile = Profile("equal", tuple(Layer(str(n), 1.0, 2.0, 1, 1) for n in range(4)))
    cluster = Cluster.flat(4, Link(0.0, 1.5))
    best = PartitionInput(profile, cluster, "1f1b").search(9).best()
    assert best is not None and len(best.cuts) > 1
    plan = partition(profile, cluster, "1f1b")
    assert len(plan.cuts) < len(best.cuts)
    deep = generate("1f1b", len(best.cuts), 1, profile=profile, cuts=best.cuts)
    assert plan.period < simulate(deep, profile, Link(0.0, 1.5)).period


@pytest.mark.few
@pytest.mark.parametrize(("schedule", "count"), SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_depths_that_are_left_out_would_not_have_won(
    schedule: str, count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, cluster = model(5 + seed, seed), Cluster((Level(2, 0.1, 0.02), Level(4, 0.3, 0.02 * seed)))
    quick = partition(profile, cluster, schedule, microbatches=count, recompute="auto")
    monkeypatch.setattr(StageSearch, "may_take", lambda search, period: len(search.given.copies) > 1)
    assert partition(profile, cluster, schedule, microbatches=count, recompute="auto") == quick


@pytest.mark.few
@settings(deadline=None)
@given(seed=st.integers(0, 999), layers=st.integers(2, 9), depth=st.integers(1, 8), beta=st.floats(0, 0.5))
@pytest.mark.parametrize(("schedule", "count"), SCHEDULES)
def test_what_decides_that_a_depth_is_left_out_is_a_bound(
    schedule: str, count: int, seed: int, layers: int, depth: int, beta: float
) -> None:
    """The bottleneck is none: RS and AG hide in more places than the backward that it takes from them."""
    profile, cluster = model(layers, seed), Cluster((Level(2, 0.1, 0.02), Level(4, 0.3, beta)))
    plan = partition(profile, cluster, schedule, microbatches=count, max_stages=depth, candidates=1)
    problem = PartitionInput(profile, cluster, schedule, count)
    search = problem.search(depth)
    assert search.may_take(plan.period * (1 + 1e-9))
    assert not search.may_take(count * profile.compute / cluster.size * 0.99)


def test_plan_file(tmp_path: Path) -> None:
    profile = model(5)
    plan = partition(profile, Cluster.flat(3, Link(0.1, 0.01)), "2bw", microbatches=3)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert PipelinePlan.load(path) == plan
    assert program_of(PipelinePlan.load(path), profile) == program_of(plan, profile)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "expected a JSON object, got list"),
        ({"format": 7}, "field 'format' is 7"),
        ({"format": 1}, "missing fields"),
    ],
)
def test_damaged_plans(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelinePlan.from_dict(data)


def test_changed_plans(tmp_path: Path) -> None:
    plan = partition(model(4), Cluster.flat(2, Link(0.1, 0.01)))
    with pytest.raises(ValueError, match="the file was changed"):
        PipelinePlan.from_dict({**plan.to_dict(), "schedule": "gpipe"})
    with pytest.raises(ValueError, match="unknown fields .'extra'."):
        PipelinePlan.from_dict({**plan.to_dict(), "extra": 1})
    with pytest.raises(ValueError, match=r"field 'replicas' must have \d entries, .*got 9"):
        replace(plan, replicas=(1,) * 9)
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        PipelinePlan.load(path)


def test_plan_for_another_model() -> None:
    plan = partition(model(4), Cluster.flat(2, Link(0.1, 0.01)))
    with pytest.raises(ValueError, match="of 4 layers, this model has 5"):
        program_of(plan, model(5))
    with pytest.raises(ValueError, match="whose layer 0 has .* bytes; this model's has"):
        program_of(plan, model(4, seed=9))


def test_impossible_memory_says_so() -> None:
    with pytest.raises(ValueError, match="fits into the memory of 4 devices.*layer 'layer.' alone"):
        partition(model(5), two_levels((3, 3, 3, 3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "fast"}, "there is no pipeline schedule 'fast'; the schedules are gpipe, 1f1b"),
        (
            {"schedule": "wpipe", "max_stages": 1, "microbatches": 4},
            "puts 2 stages on a rank.* max_stages is 1",
        ),
        ({"recompute": "maybe"}, "recompute must be one of never, auto, always"),
        ({"microbatches": 0}, "at least 1 micro-batch"),
        ({"state": math.nan}, "a state of at least 0, got 1 and nan"),
        ({"max_stages": 0}, "max_stages must be at least 1, got 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(model(3), two_levels(), **options)


@pytest.mark.bench
def test_thousand_layers_on_64_devices() -> None:
    """Under 2 s of processor time (other jobs must not decide), kernels compiled, simulations included."""
    cluster = Cluster((Level(8, 1e-5, 1e-2), Level(8, 5e-5, 8e-2)), tuple([20_000] * 64))
    profile = model(1000)
    partition(profile, cluster, "pipedream", recompute="auto")
    begin = time.process_time()
    plan = partition(profile, cluster, "pipedream", recompute="auto")
    seconds = time.process_time() - begin
    assert len(plan.cuts) > 1
    assert seconds < 2, f"{seconds:.2f} s"
