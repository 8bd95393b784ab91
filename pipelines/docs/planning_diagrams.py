"""Redrawn diagrams of the papers on planning: Rignall, Helix and ThunderServe."""

from __future__ import annotations

from pipelines.docs.sheet import Box, Sheet


def rignall_service() -> Sheet:
    """Requests go to a prefill island, their caches to a decode island."""
    sheet = Sheet("Rignall: a service of islands", 760, 300)
    users = sheet.box(12, 128, 90, 44, "requests", "quiet")
    plan = sheet.box(
        330, 12, 130, 52, "scheduler", "plan", small="forms the islands,\ndivides the traffic"
    )
    router = sheet.box(132, 122, 96, 56, "router", "plan", small="by length")
    sheet.arrow(users.right(), router.left())
    sheet.frame(262, 84, 190, 204, "prefill islands")
    sheet.frame(548, 84, 200, 204, "decode islands")
    first = [
        sheet.box(280, 112 + 58 * k, 154, 44, text, "prefill")
        for k, text in enumerate(("16 H100", "32 A100", "8 H200"))
    ]
    second = [
        sheet.box(566, 112 + 58 * k, 164, 44, text, "decode")
        for k, text in enumerate(("32 H200", "64 H20", "16 H20"))
    ]
    for k, one in enumerate(first):
        sheet.arrow(router.right(0.3 + 0.2 * k), one.left())
    for k, one in enumerate(first):
        sheet.arrow(one.right(), second[k].left())
    sheet.arrow(first[0].right(0.7), second[1].left(0.3))
    sheet.note(500, 130, "KV cache")
    sheet.arrow(plan.left(), router.top(), via=((180, 38),), dashed=True)
    sheet.arrow(plan.bottom(0.3), (369, 84), dashed=True)
    sheet.arrow(plan.right(), (648, 84), via=((648, 38),), dashed=True)
    return sheet


def rignall_loops() -> Sheet:
    """The outer loop proposes layouts, the inner loop says what they carry."""
    sheet = Sheet("Rignall: outer and inner loop", 760, 200)
    inventory = sheet.box(12, 30, 130, 44, "inventory", "quiet", small="GPUs of each type")
    lengths = sheet.box(12, 120, 130, 44, "workload", "quiet", small="lengths of requests")
    outer = sheet.box(
        200, 68, 150, 60, "outer loop", "plan", small="Bayesian optimisation\nof layouts"
    )
    inner = sheet.box(
        460, 68, 150, 60, "inner loop", "plan", small="linear program of\nassignments"
    )
    best = sheet.box(650, 74, 98, 48, "best plan", "decode")
    sheet.arrow(inventory.right(), outer.left(0.3), via=((172, 52), (172, 86)))
    sheet.arrow(lengths.right(), inner.bottom(0.3), via=((505, 142),))
    sheet.arrow(outer.right(0.3), inner.left(0.3), "island layout", at=(405, 78))
    sheet.arrow(inner.left(0.75), outer.right(0.75), "throughput", at=(405, 132))
    sheet.arrow(inner.right(), best.left())
    return sheet


def rignall_inner() -> Sheet:
    """Ranges of lengths are packed into islands, one program for both phases."""
    sheet = Sheet("Rignall: the inner loop packs ranges into islands", 760, 280)
    sheet.note(95, 24, "lengths of requests", strong=True)
    for k, (text, share) in enumerate(
        (("0 to 500", 90), ("500 to 1000", 120), ("1000 to 2000", 100), ("2000 and more", 60))
    ):
        y = 40 + 56 * k
        sheet.box(12, y, 118, 40, text, "quiet")
        sheet.bar(138, y + 12, 0.5 * share, 16, "data")
    sheet.note(322, 24, "speed of each range on each island", strong=True)
    table = sheet.box(
        236,
        96,
        172,
        84,
        "linear program",
        "plan",
        small="most requests per second,\nno island beyond its time,\neach range whole",
    )
    sheet.arrow((204, 138), table.left())
    sheet.note(620, 24, "share of each island's time", strong=True)
    for k, (text, kind, parts) in enumerate(
        (
            ("island 1: 16 H100", "prefill", (80, 30)),
            ("island 2: 32 A100", "prefill", (40, 60)),
            ("island 3: 64 H20", "decode", (50, 40, 20)),
            ("island 4: 16 H200", "decode", (110,)),
        )
    ):
        y = 40 + 56 * k
        one = sheet.box(470, y, 146, 40, text, kind)  # type: ignore[arg-type]
        sheet.arrow(table.right(0.2 + 0.2 * k), one.left())
        x = 626.0
        for part in parts:
            sheet.bar(x, y + 12, part, 16, "data")
            x += part
    return sheet


def rignall_outer() -> Sheet:
    """An inventory is divided into islands of one GPU type each."""
    sheet = Sheet("Rignall: the outer loop divides the inventory into islands", 760, 250)
    sheet.frame(12, 12, 250, 226, "inventory")
    sheet.frame(430, 12, 318, 226, "a layout")
    rows = (("H100", 12, (4, 8)), ("A100", 10, (6, 4)), ("H20", 12, (2, 4, 6)))
    for k, (gpu, count, islands) in enumerate(rows):
        y = 44 + 66 * k
        sheet.box(24, y, 62, 40, gpu, "quiet")
        for n in range(count):
            sheet.bar(98 + 25 * (n % 6), y + 4 + 20 * (n // 6), 18, 13, "data")
        x = 446.0
        for size in islands:
            width = 24 + 13 * size
            sheet.bar(x, y, width, 40, "plain")
            for n in range(size):
                sheet.bar(x + 12 + 13 * n, y + 13, 9, 13, "data")
            x += width + 10
    propose = sheet.box(
        286, 92, 120, 66, "optimiser", "plan", small="islands per type,\nskew of sizes"
    )
    sheet.arrow((262, 125), propose.left())
    sheet.arrow(propose.right(), (430, 125))
    return sheet


def helix_overview() -> Sheet:
    """Placement once, then a pipeline of its own for every request."""
    sheet = Sheet("Helix: placement once, a pipeline for every request", 760, 310)
    sheet.frame(12, 12, 270, 286, "coordinator")
    placer = sheet.box(
        30, 44, 150, 58, "layer placement", "plan", small="mixed-integer program,\nonce per cluster"
    )
    flow = sheet.box(30, 138, 150, 48, "largest flow", "data", small="a weight per link")
    sched = sheet.box(30, 222, 150, 48, "scheduler", "plan", small="a pipeline each")
    request = sheet.box(200, 228, 74, 36, "request", "quiet")
    sheet.arrow(placer.bottom(), flow.top())
    sheet.arrow(flow.bottom(), sched.top())
    sheet.arrow(request.left(), sched.right())
    sheet.frame(350, 12, 398, 286, "compute nodes, each with a range of layers")
    a = sheet.box(368, 80, 104, 46, "A100", "decode", small="layers 1 to 40")
    b = sheet.box(368, 190, 104, 46, "L4", "decode", small="layers 1 to 16")
    c = sheet.box(502, 190, 104, 46, "L4", "decode", small="layers 17 to 40")
    d = sheet.box(636, 80, 104, 46, "A100", "decode", small="layers 41 to 80")
    e = sheet.box(636, 190, 104, 46, "2 x T4", "decode", small="layers 41 to 80")
    sheet.arrow(a.right(), d.left(), "request 1", at=(530, 96), thick=2.2)
    sheet.arrow(b.right(), c.left(), thick=1.8)
    sheet.arrow(c.right(), e.left(), thick=1.8)
    sheet.note(487, 180, "request 2")
    sheet.arrow(c.top(0.7), d.bottom(0.2), dashed=True)
    sheet.arrow(placer.right(0.4), (350, 67), "layers", at=(316, 60))
    sheet.arrow(sched.bottom(0.7), b.bottom(), via=((135, 286), (420, 286)))
    sheet.note(434, 280, "to the first node of its pipeline", anchor="start")
    sheet.arrow(d.top(), (282, 46), via=((688, 46),))
    sheet.note(560, 62, "each token back")
    return sheet


def thunderserve_workflow() -> Sheet:
    """Two levels: groups and phases by tabu search, parallelism and routes below."""
    sheet = Sheet("ThunderServe: two levels of scheduling", 760, 250)
    given = sheet.box(12, 92, 116, 60, "given", "quiet", small="model, GPUs,\nlinks, workload")
    sheet.frame(152, 20, 236, 214, "upper level")
    groups = sheet.box(170, 48, 200, 44, "groups of GPUs", "plan", small="who serves together")
    phases = sheet.box(170, 108, 200, 44, "phase of each group", "plan", small="prefill or decode")
    tabu = sheet.box(170, 172, 200, 44, "tabu search", "data", small="neighbours of the best")
    sheet.frame(416, 20, 226, 214, "lower level")
    parallel = sheet.box(
        432, 60, 194, 54, "parallel configuration", "plan", small="degrees and layers per group"
    )
    routes = sheet.box(432, 146, 194, 54, "orchestration", "plan", small="share of each pair")
    plan = sheet.box(662, 96, 88, 52, "plan", "decode", small="with its SLO\nattainment")
    sheet.arrow(given.right(), (152, 122))
    sheet.arrow(groups.bottom(), phases.top())
    sheet.arrow(tabu.top(), phases.bottom(), both=True)
    sheet.arrow(phases.right(), parallel.left(), via=((402, 130), (402, 87)))
    sheet.arrow(parallel.bottom(), routes.top())
    sheet.arrow(
        routes.left(), tabu.right(), "attainment", at=(524, 220), via=((402, 173), (402, 194))
    )
    sheet.arrow(routes.right(), plan.left(), via=((652, 173), (652, 122)))
    return sheet


def thunderserve_moves() -> Sheet:
    """Four neighbours of a solution."""
    sheet = Sheet("ThunderServe: neighbours in the tabu search", 760, 290)

    def group(x: float, y: float, text: str, prefill: bool) -> Box:
        return sheet.box(x, y, 92, 34, text, "prefill" if prefill else "decode")

    moves = (
        ("flip the phase", ((("4 A40", True),), (("4 A40", False),))),
        ("split", ((("8 A40", True),), (("4 A40", True), ("4 A40", False)))),
        ("merge", ((("2 A5000", True), ("2 3090Ti", False)), (("2+2 mixed", False),))),
        ("move GPUs", ((("6 A40", True), ("2 A40", False)), (("4 A40", True), ("4 A40", False)))),
    )
    for k, (name, (before, after)) in enumerate(moves):
        x, y = 12 + 372 * (k % 2), 12 + 128 * (k // 2)
        sheet.frame(x, y, 362, 116, name)
        for side, groups in ((18, before), (252, after)):
            top = y + 64 - 22 * len(groups)
            for n, (text, prefill) in enumerate(groups):
                group(x + side, top + 5 + 44 * n, text, prefill)
        sheet.arrow((x + 124, y + 64), (x + 240, y + 64))
    sheet.bar(270, 270, 14, 12, "prefill")
    sheet.note(292, 281, "prefill", anchor="start")
    sheet.bar(390, 270, 14, 12, "decode")
    sheet.note(412, 281, "decode", anchor="start")
    return sheet


def thunderserve_overview() -> Sheet:
    """Scheduler, workload profiler and task coordinator."""
    sheet = Sheet("ThunderServe: scheduler, profiler and coordinator", 760, 290)
    users = sheet.box(12, 118, 92, 44, "requests", "quiet")
    coordinator = sheet.box(
        154, 108, 150, 64, "task coordinator", "plan", small="dispatches,\nwatches heartbeats"
    )
    profiler = sheet.box(154, 222, 150, 50, "workload profiler", "data", small="lengths and rates")
    scheduler = sheet.box(
        154, 14, 150, 56, "scheduler", "plan", small="plans, and replans\nphases lightly"
    )
    sheet.arrow(users.right(), coordinator.left())
    sheet.arrow(scheduler.bottom(0.65), coordinator.top(0.65), "plan", at=(270, 94))
    sheet.arrow(coordinator.top(0.35), scheduler.bottom(0.35), "timeouts", at=(176, 94))
    sheet.arrow(coordinator.bottom(), profiler.top())
    sheet.arrow(
        profiler.left(), scheduler.left(), "shifts", at=(110, 216), via=((130, 247), (130, 42))
    )
    sheet.frame(372, 14, 376, 262, "GPUs in the cloud")
    one = sheet.box(392, 52, 136, 50, "prefill replica", "prefill", small="8 A40")
    two = sheet.box(392, 176, 136, 50, "prefill replica", "prefill", small="4 A6000")
    three = sheet.box(594, 52, 136, 50, "decode replica", "decode", small="4 3090Ti")
    four = sheet.box(594, 176, 136, 50, "decode replica", "decode", small="2 A5000 + 2 3090Ti")
    for first in (one, two):
        sheet.arrow(coordinator.right(), first.left())
        for second in (three, four):
            sheet.arrow(first.right(), second.left())
    sheet.note(561, 256, "KV caches, quantised to 4 bits")
    return sheet


def thunderserve_networks() -> Sheet:
    """The same instances behind fast and slow links between them."""
    sheet = Sheet("ThunderServe: the same GPUs on two networks", 760, 210)
    for x, name, width, rate in (
        (12, "case A: fast links between instances", 3.4, "40 Gbit/s"),
        (390, "case B: slow links between instances", 1.0, "5 Gbit/s"),
    ):
        sheet.frame(x, 12, 358, 186, name)
        first = sheet.box(x + 22, 62, 116, 52, "4 A40", "prefill", small="one instance")
        second = sheet.box(x + 222, 62, 116, 52, "4 3090Ti", "decode", small="one instance")
        sheet.arrow(first.right(), second.left(), thick=width, both=True)
        sheet.note(x + 180, 72, rate)
        sheet.note(x + 179, 146, "inside an instance: PCIe")
    sheet.note(191, 176, "phases may stand on different instances", strong=True)
    sheet.note(569, 176, "KV caches must stay within an instance", strong=True)
    return sheet
