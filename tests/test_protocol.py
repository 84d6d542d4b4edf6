"""The protocol: steps, label tables, and the published image counts."""

from __future__ import annotations

import json
import pickle
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from incseg.protocol import RULES, SETTINGS, TASKS, LabelRules, Protocol
from incseg.types import DatasetInfo, UserError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

VOC = DatasetInfo("voc", tuple(f"voc class {i}" for i in range(1, 21)))
ADE = DatasetInfo("ade20k", tuple(f"ade class {i}" for i in range(1, 151)), has_background=False)
TOY = DatasetInfo("toy", ("circle", "square", "traffic light", "star", "ring"))


def shared_presence(name: str) -> list[tuple[int, ...]]:
    path = SHARED / "presence" / name
    if not path.exists():
        pytest.skip(f"needs the presence list {name} in ../shared/data/presence")
    return [tuple(int(i) + 1 for i in line.split()[1:]) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def voc_train() -> list[tuple[int, ...]]:
    return shared_presence("voc_train_aug.txt")


@pytest.fixture(scope="module")
def ade_train() -> list[tuple[int, ...]]:
    return shared_presence("ade_train.txt")


def counts(protocol: Protocol, presence: list[tuple[int, ...]]) -> list[int]:
    return [len(images) for images in protocol.train_images(presence)]


# --- the published counts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "setting", "expected"),
    [
        ("19-1", "overlapped", [10410, 548]),
        ("19-1", "disjoint", [10034, 548]),
        ("15-5", "overlapped", [9568, 2145]),
        ("15-5", "disjoint", [8437, 2145]),
        ("15-1", "overlapped", [9568, 487, 299, 491, 500, 548]),
        ("15-1", "disjoint", [8437, 378, 299, 420, 500, 548]),
        ("10-10", "overlapped", [6139, 6876]),
        ("10-10", "disjoint", [3706, 6876]),
        ("5-3", "overlapped", [2836, 2331, 1542, 2095, 4484, 1468]),
        ("5-3", "disjoint", [1753, 1517, 624, 1296, 3924, 1468]),
        ("joint", "overlapped", [10582]),
    ],
)
def test_voc_counts(voc_train, task, setting, expected):
    assert counts(Protocol(VOC, task, setting), voc_train) == expected


@pytest.mark.parametrize(
    ("task", "setting", "order", "expected"),
    [
        ("100-50", "overlapped", "a", [20192, 9390]),
        ("100-10", "overlapped", "a", [20192, 1710, 2294, 2747, 4279, 2844]),
        ("100-50", "pseudo-disjoint", "a", [13452, 6744]),
        ("100-10", "pseudo-disjoint", "a", [13452, 1130, 1200, 1366, 1550, 1498]),
        ("50-50", "pseudo-disjoint", "a", [8219, 6384, 5593]),
        ("100-10", "pseudo-disjoint", "b", [10375, 1362, 1346, 2084, 2609, 2420]),
        ("100-50", "pseudo-disjoint", "b", [10375, 1362 + 1346 + 2084 + 2609 + 2420]),
    ],
)
def test_ade_counts(ade_train, task, setting, order, expected):
    assert counts(Protocol(ADE, task, setting, order=order), ade_train) == expected


@pytest.mark.parametrize("task", ["100-50", "100-5"])
def test_ade_pseudo_disjoint_gives_each_labelled_image_once(ade_train, task):
    images = sum(Protocol(ADE, task, "pseudo-disjoint").train_images(ade_train), ())
    assert sorted(images) == [i for i, ids in enumerate(ade_train) if ids]
    assert len(images) == 20196


def test_ade_order_b_is_the_published_one():
    path = SHARED / "ade_order_b.txt"
    if not path.exists():
        pytest.skip("needs ../shared/data/ade_order_b.txt")
    published: dict[str, list[tuple[int, ...]]] = {}
    for task, ids in re.findall(r"^(\S+) step \d: (.*)$", path.read_text(), flags=re.MULTILINE):
        published.setdefault(task, []).append(tuple(map(int, ids.split())))
    assert set(published) == {"100-50", "100-10", "50-50"}
    for task, groups in published.items():
        assert [step.new for step in Protocol(ADE, task, "overlapped", order="b").steps] == groups


# --- tasks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("info", "task"), [(d, t) for d in (VOC, ADE) for t in TASKS[d.name]])
def test_named_tasks_learn_every_class_once(info, task):
    protocol = Protocol(info, task, "overlapped")
    assert protocol.classes_in_order == tuple(range(1, len(info.classes) + 1))
    sizes = [len(step.new) for step in protocol.steps]
    if task == "joint":
        assert sizes == [len(info.classes)]
    else:
        base, increment = map(int, task.split("-"))
        assert sizes[0] == base
        assert set(sizes[1:]) == {increment}


def test_a_step_has_old_new_seen_future_and_names():
    first, second, third = Protocol(TOY, "2-2", "overlapped").steps
    assert (first.old, first.new, first.seen, first.future) == ((), (1, 2), (1, 2), (3, 4, 5))
    assert (second.old, second.new, second.seen, second.future) == ((1, 2), (3, 4), (1, 2, 3, 4), (5,))
    assert (third.index, third.new, third.names) == (2, (5,), ("ring",))


def test_alias_and_spacing():
    assert Protocol(VOC, " 15-5s ", "overlapped").task == "15-1"
    assert Protocol(VOC, "015-05", "overlapped").task == "15-5"


OWN = [["star", "traffic light"], ["circle"]]


@pytest.mark.parametrize("task", [OWN, "star, traffic light / circle", "star,traffic light/circle", json.dumps(OWN)])
def test_own_groups(task):
    protocol = Protocol(TOY, task, "overlapped")
    assert [step.new for step in protocol.steps] == [(4, 3), (1,)]
    assert protocol.names_in_order == ("star", "traffic light", "circle")
    assert protocol.steps[-1].future == (2, 5), "classes that no group names stay in the future"
    assert protocol.task == "star,traffic light/circle"


@pytest.mark.parametrize("name", ["a,b", "a/b", "[a", "joint", "3-1"])
def test_own_task_is_written_so_that_it_parses_again(name):
    info = DatasetInfo("odd", (name, "c", "d", "e"))
    for groups in ([[name]], [["c"], [name]], [[name, "d"], ["c"]]):
        protocol = Protocol(info, groups, "overlapped")
        again = Protocol(info, protocol.task, "overlapped")
        assert (again.task, again.groups) == (protocol.task, protocol.groups)


def test_one_class_alone_is_written_by_its_name():
    assert Protocol(TOY, [["circle"]], "overlapped").task == "circle"
    assert Protocol(TOY, "circle", "overlapped").task == "circle"


def test_a_mistyped_class_gets_the_nearest():
    with pytest.raises(UserError, match=r"unknown task 'circel'; did you mean 'circle'\?"):
        Protocol(TOY, "circel", "overlapped")


def test_joint_setting_makes_one_step_and_remembers_the_groups():
    protocol = Protocol(VOC, "15-5", "joint")
    assert protocol.steps == Protocol(VOC, "joint", "overlapped").steps
    assert [len(group) for group in protocol.groups] == [15, 5]


@pytest.mark.parametrize(
    ("info", "task", "changes", "message"),
    [
        (VOC, "15_1", {}, r"unknown task '15_1'; did you mean '15-1'\? Allowed: 19-1, .*A-B"),
        (VOC, "20-1", {}, r"'20-1' does not fit the 20 classes of voc.*1\.\.19"),
        (VOC, "0-5", {}, "does not fit"),
        (VOC, "15-0", {}, "B be at least 1"),
        (TOY, "circle,sqare/star", {}, r"step 0 .*unknown class 'sqare'; did you mean 'square'\?"),
        (TOY, "Circle/star", {}, r"did you mean 'circle'\?"),
        (TOY, "circle/star,circle", {}, "'circle' is named in step 0 and again in step 1"),
        (TOY, "circle//star", {}, "step 1 of the task has no class"),
        (TOY, "circle,,star", {}, "unknown class ''"),
        (TOY, [["circle"], []], {}, "step 1 of the task has no class"),
        (TOY, [], {}, "not a sequence of groups"),
        (TOY, ["circle", "star"], {}, "not a sequence of groups"),
        (TOY, '["circle", "star"]', {}, "not a list of lists"),
        (TOY, "[[1], [2]]", {}, "not a list of lists of class names"),
        (TOY, '[["circle"', {}, "not valid JSON"),
        (VOC, "15-1", {"setting": "overlaped"}, r"unknown setting 'overlaped'; did you mean 'overlapped'\?"),
        (
            VOC,
            "15-1",
            {"rules": "plob"},
            r"unknown label rules 'plob'; did you mean 'plop'\? Allowed: mib, plop",
        ),
        (VOC, "15-1", {"order": "c"}, "unknown order 'c'; Allowed: a, b"),
        (VOC, "15-1", {"order": "b"}, "order 'b' exists for ade20k only"),
        (VOC, "15-1", {"setting": "pseudo-disjoint"}, "exists for ade20k only"),
        (ADE, "100-5", {"order": "b"}, "'100-5' has no order b"),
        (ADE, [["ade class 1"]], {"order": "b"}, "own groups"),
        (DatasetInfo("toy", ("a", "a")), "joint", {}, "more than one class 'a'"),
        (DatasetInfo("toy", tuple(map(str, range(254)))), "joint", {}, "254 classes; 1 to 253"),
    ],
)
def test_errors_name_what_came_and_what_is_allowed(info, task, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        Protocol(info, task, **{"setting": "overlapped"} | changes)
    assert "\n" not in str(caught.value)


def test_long_lists_of_names_are_cut_in_errors():
    with pytest.raises(UserError, match=r"did you mean 'ade class 15\d?'\? Allowed: .* and 126 more"):
        Protocol(ADE, "ade clas 15/ade class 1", "overlapped")


# --- label tables ---------------------------------------------------------------------------------------


def as_full_table(entries: dict[int, int]) -> list[int]:
    return [entries.get(i, 255) for i in range(256)]


@pytest.mark.parametrize(("rules", "void"), [("mib", 0), ("plop", 255)])
def test_train_table(rules, void):
    step = Protocol(TOY, "ring,star/circle,traffic light", "overlapped", rules).steps[1]
    expected = {0: 0, 1: 3, 2: 0, 3: 4, 4: 0, 5: 0, 255: void}
    assert step.train_table.tolist() == as_full_table(expected)


@pytest.mark.parametrize("rules", ["mib", "plop"])
def test_test_table(rules):
    protocol = Protocol(TOY, "ring,star/circle", "overlapped", rules)
    assert protocol.steps[0].test_table.tolist() == as_full_table({0: 0, 1: 254, 2: 254, 3: 254, 4: 2, 5: 1})
    assert protocol.steps[1].test_table.tolist() == as_full_table({0: 0, 1: 3, 2: 254, 3: 254, 4: 2, 5: 1})


@pytest.mark.parametrize(("rules", "void", "zero_at_test"), [("mib", 0, 255), ("plop", 255, 0)])
def test_tables_without_background(rules, void, zero_at_test):
    info = DatasetInfo("toy", ("a", "b"), has_background=False)
    step = Protocol(info, "1-1", "overlapped", rules).steps[0]
    assert step.train_table.tolist() == as_full_table({0: 0, 1: 1, 2: 0, 255: void})
    assert step.test_table.tolist() == as_full_table({0: zero_at_test, 1: 1, 2: 254})


def test_voc_labels_are_its_ids_and_ade_order_b_is_not():
    voc = Protocol(VOC, "15-1", "overlapped").steps[-1].test_table
    assert voc[:21].tolist() == list(range(21))
    ade = Protocol(ADE, "100-50", "overlapped", order="b")
    assert ade.steps[-1].test_table[3] == 2
    assert ade.prediction_table[2] == 3


def test_prediction_table_undoes_the_test_table():
    protocol = Protocol(TOY, "ring,star/circle", "overlapped")
    assert protocol.prediction_table.tolist() == as_full_table({0: 0, 1: 5, 2: 4, 3: 1})


def test_tables_are_read_only_bytes_and_steps_can_be_compared_hashed_and_sent():
    protocol = Protocol(TOY, "2-1", "overlapped")
    for step in protocol.steps:
        for table in (step.train_table, step.test_table, protocol.prediction_table):
            assert (table.shape, table.dtype) == ((256,), np.uint8)
            with pytest.raises(ValueError, match="read-only"):
                table[0] = 1
    again = pickle.loads(pickle.dumps(protocol))
    assert again.steps == protocol.steps
    assert len({*again.steps, *protocol.steps}) == len(protocol.steps)


# --- label rules ----------------------------------------------------------------------------------------


def test_rules_are_described():
    mib, plop = (" ".join(RULES[name].describe(VOC)) for name in ("mib", "plop"))
    assert "void pixels (255) count as background" in mib
    assert "not learnt yet are ignored" in mib
    assert "future classes count as background; void pixels (255) are ignored" in plop
    assert "not learnt yet count as background" in plop
    assert "unlabelled" not in plop
    assert RULES["mib"].describe(ADE)[-1].endswith("are ignored at test")
    assert RULES["plop"].describe(ADE)[-1].endswith("count as background at test")


def test_own_rules():
    ssul = LabelRules("ssul", "ignore", "ignore", "all", "background")
    assert LabelRules(**ssul.as_dict()) == ssul
    protocol = Protocol(TOY, "2-1", "overlapped", ssul)
    assert protocol.test_images(protocol.steps[0], [(1,), (5,), ()]) == (0, 1, 2)
    with pytest.raises(UserError, match=r"unseen_at_test 'ignored'; did you mean 'ignore'\?"):
        LabelRules("mine", "ignore", "ignored", "all", "background")


# --- which images ---------------------------------------------------------------------------------------

SCENES = [(1,), (1, 3), (3, 5), (), (2, 4), (5,), (1, 2, 3, 4, 5)]


def test_images_by_hand():
    overlapped, disjoint = (Protocol(TOY, "2-2", s) for s in ("overlapped", "disjoint"))
    assert overlapped.train_images(SCENES) == ((0, 1, 4, 6), (1, 2, 4, 6), (2, 5, 6))
    assert disjoint.train_images(SCENES) == ((0,), (1, 4), (2, 5, 6))
    assert [overlapped.test_images(s, SCENES) for s in overlapped.steps] == [
        (0, 1, 4, 6),
        (0, 1, 2, 4, 6),
        (0, 1, 2, 4, 5, 6),
    ]
    assert Protocol(TOY, "2-2", "joint").train_images(SCENES) == ((0, 1, 2, 4, 5, 6),)


def test_disjoint_leaves_out_images_with_a_class_that_is_never_learnt():
    protocol = Protocol(TOY, "circle/traffic light", "disjoint")
    assert protocol.train_images(SCENES) == ((0,), (1,))


def test_pseudo_disjoint_by_hand():
    """The rarer class gets the shared image. In a tie the first class does, and the other class the next image."""
    info = DatasetInfo("ade20k", ("a", "b"), has_background=False)
    protocol = Protocol(info, "1-1", "pseudo-disjoint")
    assert protocol.train_images([(1, 2), (1,), (1,), (2,), ()]) == ((1, 2), (0, 3))
    assert protocol.train_images([(1, 2), (1, 2), (1,), (2,)]) == ((0, 2), (1, 3))


def test_presence_of_another_dataset_is_refused():
    for wrong in (0, 6):
        with pytest.raises(UserError, match=rf"presence of image 1 is \[{wrong}\].*1\.\.5"):
            Protocol(TOY, "2-2", "overlapped").train_images([(1,), (wrong,)])


def test_as_dict_is_json_with_counts():
    protocol = Protocol(TOY, "2-2", "disjoint", "mib")
    plain = protocol.as_dict()
    assert "train_images" not in plain["steps"][0]
    full = json.loads(json.dumps(protocol.as_dict(SCENES, SCENES)))
    assert full["steps"][1] == {
        "index": 1,
        "classes": ["traffic light", "star"],
        "ids": [3, 4],
        "train_images": 2,
        "test_images": 5,
    }
    assert (full["dataset"], full["task"], full["setting"], full["order"]) == ("toy", "2-2", "disjoint", "a")
    assert full["rules"] == RULES["mib"].as_dict()


# --- properties -----------------------------------------------------------------------------------------


@st.composite
def tasks(draw, name="toy"):
    """Draw a dataset, and groups of some of its classes in some order."""
    num_classes = draw(st.integers(2, 12))
    info = DatasetInfo(name, tuple(f"c{i}" for i in range(1, num_classes + 1)), draw(st.booleans()))
    learnt = draw(st.permutations(info.classes))[: draw(st.integers(1, num_classes))]
    cuts = sorted(draw(st.sets(st.integers(1, len(learnt) - 1)))) if len(learnt) > 1 else []
    return info, [learnt[a:b] for a, b in zip([0, *cuts], [*cuts, len(learnt)], strict=True)]


def scenes(info):
    return st.lists(st.sets(st.integers(1, len(info.classes)), max_size=4), max_size=30)


@settings(deadline=None)
@given(tasks(), st.sampled_from(sorted(RULES)))
def test_steps_partition_the_classes_and_tables_agree(task, rules):
    info, groups = task
    protocol = Protocol(info, groups, "overlapped", rules)
    assert Protocol(info, protocol.task, "overlapped").groups == protocol.groups
    seen: tuple[int, ...] = ()
    for step, names in zip(protocol.steps, groups, strict=True):
        assert step.names == tuple(names)
        assert step.old == seen
        seen = step.seen
        assert sorted(step.seen + step.future) == list(range(1, len(info.classes) + 1))
        labels = list(range(1, len(seen) + 1))
        assert step.test_table[list(seen)].tolist() == labels
        assert step.train_table[list(step.new)].tolist() == labels[len(step.old) :]
        assert protocol.prediction_table[step.test_table[list(seen)]].tolist() == list(seen)
        assert set(step.train_table.tolist()) == {0, 255, *labels[len(step.old) :]}
    assert seen == protocol.classes_in_order


@settings(deadline=None)
@given(st.data())
def test_disjoint_lies_in_overlapped_and_in_one_step_at_most(data):
    info, groups = data.draw(tasks())
    presence = data.draw(scenes(info))
    overlapped, disjoint = (
        [set(images) for images in Protocol(info, groups, setting).train_images(presence)]
        for setting in ("overlapped", "disjoint")
    )
    for in_overlapped, in_disjoint in zip(overlapped, disjoint, strict=True):
        assert in_disjoint <= in_overlapped
    assert all(not (a & b) for a, b in combinations(disjoint, 2))
    all_named = sum(len(group) for group in groups) == len(info.classes)
    if all_named:
        # The step of its last-learnt class takes an image; nothing labelled is lost.
        assert set().union(*disjoint) == {i for i, ids in enumerate(presence) if ids}
        assert disjoint[-1] == overlapped[-1]


@settings(deadline=None)
@given(st.data())
def test_pseudo_disjoint_partitions_the_images_with_a_class_of_the_task(data):
    info, groups = data.draw(tasks(name="ade20k"))
    presence = data.draw(scenes(info))
    protocol = Protocol(info, groups, "pseudo-disjoint")
    split = protocol.train_images(presence)
    learnt = set(protocol.classes_in_order)
    assert sorted(sum(split, ())) == [i for i, ids in enumerate(presence) if ids & learnt]
    for step, images in zip(protocol.steps, split, strict=True):
        assert all(presence[i] & set(step.new) for i in images)


@settings(deadline=None)
@given(st.data())
def test_images_agree_with_naive_loops(data):
    info, groups = data.draw(tasks())
    presence = data.draw(scenes(info))
    for setting in SETTINGS[:2]:
        protocol = Protocol(info, groups, setting)
        for step, images in zip(protocol.steps, protocol.train_images(presence), strict=True):
            wanted = []
            for i, ids in enumerate(presence):
                if any(c in step.new for c in ids) and (setting == "overlapped" or all(c in step.seen for c in ids)):
                    wanted.append(i)
            assert images == tuple(wanted)
