"""Redrawn diagrams of the papers on routing: Xiong et al. and HeteroServe."""

from __future__ import annotations

from pipelines.docs.sheet import Sheet


def xiong_architecture() -> Sheet:
    """Offline: a deployment per machine; online: a scheduler before its instances."""
    sheet = Sheet("Xiong et al.: from a cluster to instances behind a scheduler", 760, 300)
    sheet.frame(10, 10, 350, 280, "once: deployment configuration")
    model = sheet.box(28, 40, 140, 40, "model", "quiet")
    fleet = sheet.box(28, 100, 140, 40, "machines, GPUs", "quiet")
    trace = sheet.box(28, 160, 140, 40, "sampled requests", "quiet")
    fits = sheet.box(28, 222, 140, 52, "latency fits", "data", small="p1 to p8 per degree")
    best = sheet.box(
        200, 108, 146, 84, "try every degree", "plan", small="memory, Algorithm 1,\nkeep the best"
    )
    for k, one in enumerate((model, fleet, trace, fits)):
        sheet.arrow(one.right(), best.left(0.2 + 0.2 * k))
    sheet.frame(390, 10, 360, 280, "for every request: scheduling")
    users = sheet.box(408, 40, 96, 40, "requests", "quiet")
    chosen = sheet.box(408, 120, 132, 60, "scheduler", "plan", small="Algorithm 2:\nleast workload")
    sheet.arrow(users.bottom(), chosen.top(48 / 132))
    for k, text in enumerate(("instance 1, TP 2", "instance 2, TP 2", "instance n, TP 1")):
        one = sheet.box(600, 66 + 66 * k, 136, 40, text, "decode")
        sheet.arrow(chosen.right(0.25 + 0.25 * k), one.left())
    sheet.arrow(best.right(), chosen.left(), "configuration", at=(474, 202), dashed=True)
    return sheet


def xiong_phases() -> Sheet:
    """A prompt is prefilled at once; then each step gives one token and reads the KV cache."""
    sheet = Sheet("Prefill and decode of one request", 760, 230)
    prompt = sheet.box(15, 40, 150, 44, "prompt", "quiet", small="input tokens together")
    first = sheet.box(215, 40, 140, 44, "prefill", "prefill", small="bound by arithmetic")
    sheet.arrow(prompt.right(), first.left())
    steps = []
    for k in range(3):
        x = 405 + 118 * k
        steps.append(sheet.box(x, 40, 98, 44, "decode", "decode", small=f"token {k + 2}"))
    sheet.arrow(first.right(), steps[0].left(), "token 1", at=(381, 34))
    sheet.arrow(steps[0].right(), steps[1].left())
    sheet.arrow(steps[1].right(), steps[2].left())
    sheet.box(215, 150, 524, 44, "KV cache", "data", small="one entry per token so far")
    sheet.arrow(first.bottom(), (first.bottom()[0], 150), "written", at=(258, 122))
    for one in steps:
        sheet.arrow((one.bottom(0.5)[0], 150), one.bottom(0.5), both=True)
    sheet.note(590, 216, "each step reads all of it: bound by memory bandwidth")
    return sheet


def xiong_scheduler() -> Sheet:
    """Fitted instances and a predicted output give a workload; the mapper takes the least."""
    sheet = Sheet("Xiong et al.: parts of the scheduler", 760, 300)
    request = sheet.box(15, 118, 100, 50, "request", "quiet", small="its input")
    length = sheet.box(165, 30, 160, 50, "length predictor", "plan", small="output tokens")
    profile = sheet.box(165, 220, 160, 50, "instance profiler", "data", small="fits p1 to p8, once")
    load = sheet.box(
        375, 108, 160, 70, "workload calculator", "plan", small="time of a full batch\nper request"
    )
    mapper = sheet.box(375, 220, 160, 50, "mapper", "plan", small="least workload in sum")
    sheet.arrow(request.top(), length.left(), via=((65, 55),))
    sheet.arrow(request.right(), load.left(), "input tokens", at=(240, 137))
    sheet.arrow(length.right(), load.top(), via=((455, 55),))
    sheet.arrow(profile.right(0.3), load.left(0.8), via=((350, 235), (350, 164)))
    sheet.arrow(load.bottom(), mapper.top(), "one per instance", at=(512, 204))
    sheet.arrow(mapper.left(0.7), profile.right(0.7), "past choices", at=(350, 284), both=True)
    for k in range(3):
        one = sheet.box(620, 60 + 72 * k, 125, 44, f"instance {'12n'[k]}", "decode")
        sheet.arrow(mapper.right(0.3 + 0.2 * k), one.left(), via=((580, 235 + 10 * k),))
    return sheet


def heteroserve_architecture() -> Sheet:
    """A classifier bins the prompt, a filter keeps devices that admit it, a score chooses."""
    sheet = Sheet("HeteroServe: a request on its way to a device", 760, 270)
    request = sheet.box(12, 105, 84, 44, "request", "quiet")
    bins = sheet.box(126, 98, 130, 58, "length classifier", "plan", small="one of K bins")
    admit = sheet.box(286, 98, 130, 58, "admission filter", "plan", small="devices of the bin")
    route = sheet.box(
        446, 98, 130, 58, "router", "plan", small="highest capability,\nqueue counted in"
    )
    sheet.arrow(request.right(), bins.left())
    sheet.arrow(bins.right(), admit.left())
    sheet.arrow(admit.right(), route.left())
    sheet.box(
        286,
        12,
        290,
        44,
        "capability of each device",
        "data",
        small="at start, anew when the workload shifts",
    )
    sheet.arrow((351, 56), admit.top())
    sheet.arrow((511, 56), route.top())
    for k, (text, small) in enumerate(
        (("H100", "all bins"), ("A100", "up to long"), ("L40S", "short bins"))
    ):
        one = sheet.box(636, 30 + 76 * k, 112, 52, text, "decode", small=small)
        sheet.arrow(route.right(0.25 + 0.25 * k), one.left())
    sheet.arrow(
        (636, 234), (511, 156), "queue depths", at=(570, 252), via=((511, 234),), dashed=True
    )
    sheet.line((692, 234), (636, 234))
    sheet.note(215, 250, "each device runs an unchanged engine with continuous batching")
    return sheet


def heteroserve_strategies() -> Sheet:
    """Three strategies, and which requests they send where."""
    sheet = Sheet("HeteroServe: three ways to divide short and long requests", 760, 300)
    names = ("uniform", "in proportion to memory", "HeteroServe")
    said = (
        "the same to every device,\nwhatever its length",
        "more to larger memories,\nlong ones to small ones too",
        "by capability; long ones only\nwhere they are admitted",
    )
    # Short and long requests of each device, in bars.
    given = (
        ((3, 3), (3, 3), (3, 3)),
        ((4, 4), (4, 4), (2, 2)),
        ((3, 6), (4, 3), (3, 0)),
    )
    for k, (name, text, shares) in enumerate(zip(names, said, given, strict=True)):
        x = 10 + 250 * k
        sheet.frame(x, 10, 240, 250, name)
        sheet.note(x + 120, 42, text)
        for row, (gpu, (short, long)) in enumerate(
            zip(("H100", "A100", "L40S"), shares, strict=True)
        ):
            y = 78 + 58 * row
            sheet.box(x + 12, y, 62, 44, gpu, "quiet")
            for n in range(short):
                sheet.bar(x + 86 + 22 * n, y + 3, 14, 16, "decode")
            for n in range(long):
                sheet.bar(x + 86 + 24 * n, y + 26, 20, 16, "prefill")
    sheet.bar(250, 274, 14, 14, "decode")
    sheet.note(272, 286, "short prompts", anchor="start")
    sheet.bar(400, 274, 20, 14, "prefill")
    sheet.note(428, 286, "long prompts", anchor="start")
    return sheet
