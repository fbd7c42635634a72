from roll.rollout.rewarding import RewardRouter
from tests.rollout.fake_clusters import FakeRewards
from tests.rollout.helpers import make_group


def groups(count: int, size: int = 2, domain: str = "a", first: int = 0):
    return [make_group(first + i, [1], [[i, j] for j in range(size)], domain=domain) for i in range(count)]


def length_of(sample) -> float:
    return float(len(sample.response))


def last_number(sample) -> float:
    return float(sample.response.split()[-1])


def test_each_group_gets_the_scores_of_its_own_samples():
    router = RewardRouter({"a": FakeRewards(last_number, world_size=3), "b": FakeRewards(lambda s: 9.0)})
    given = groups(7, size=3) + groups(2, domain="b", first=7)
    router.submit(given)
    assert router.num_pending_groups == 9
    back = [group for call in reversed(router.pending) for group in router.take(call)]
    assert sorted(group.order for group in back) == list(range(9))
    for group in given:
        assert (
            group.scores().tolist()
            == ([9.0] * 3 if group.prompt.domain == "b" else [0.0, 1.0, 2.0])[: group.num_samples]
        )
    assert router.pending == []


def test_work_is_spread_over_the_workers_of_a_domain():
    cluster = FakeRewards(length_of, world_size=3)
    router = RewardRouter({"a": cluster})
    router.submit(groups(9))
    assert cluster.samples_of_rank == {0: 6, 1: 6, 2: 6}
    for call in [call for call in router.pending if call.rank == 1]:
        router.take(call)
    router.submit(groups(1, first=9))
    assert cluster.samples_of_rank == {0: 6, 1: 8, 2: 6}, "the one that is idle"


def test_dropped_scores_burden_nobody():
    cluster = FakeRewards(length_of, world_size=2)
    router = RewardRouter({"a": cluster})
    router.submit(groups(1))
    (call,) = router.pending
    router.drop_pending()
    assert router.num_pending_groups == 0
    assert router.take(call) == []
    router.submit(groups(1, first=1))
    assert cluster.samples_of_rank == {0: 4}, "rank 0 counts as idle again"
