"""How kernels become machine code: each that Python calls once, with all that it calls.

numba alone optimises every function together with all below it, and then once more in whatever
calls it. Here a function that another calls is only translated; optimised, turned into machine code
and cached is what Python calls, which takes a fourth of the time and runs as fast.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from numba.core import codegen, compiler, event, registry, typed_passes, types
from numba.core.compiler_machinery import register_pass

from hetero.progress import Advance, by_hand, progress


class _Unfinished(codegen.JITCodeLibrary):
    """Code that waits for the library that it is linked into: that is optimised as a whole."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Translation(typed_passes.NativeLowering):
    _name = "translation"

    def run_pass(self, state: Any) -> bool:
        """Lower a function into a library that stays unfinished."""
        state.library = _Unfinished(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        # What callers find it by has to be a function of C, of which every list has one of its own.
        found = state["cr"] = state["cr"]._replace(cfunc=[].append)
        state.targetctx.insert_user_function(found.cfunc, found.fndesc, [state.library])
        return True


class _Translator(compiler.Compiler):
    def define_pipelines(self) -> list[Any]:
        """The usual passes, the last of which leaves no machine code."""
        (passes,) = super().define_pipelines()
        passes.passes = [
            (_Translation if one is typed_passes.NativeLowering else one, what)
            for one, what in passes.passes
        ]
        passes.finalize()
        return [passes]


class Kernel(registry.CPUDispatcher):
    """A function that Python can call, and that kernels link in another form."""

    def __init__(
        self,
        py_func: Any,
        locals: Any = None,
        targetoptions: Any = None,
        pipeline_class: Any = compiler.Compiler,
    ) -> None:
        locals, options = locals or {}, targetoptions or {}
        super().__init__(py_func, locals, options, pipeline_class)
        options = {**options, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        self.linked = registry.CPUDispatcher(py_func, locals, options, _Translator)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """How a kernel calls it: integers are of one kind, so that there is one form of it."""
        plain = [types.unliteral(one) for one in args]
        wide = [types.int64 if one in types.signed_domain else one for one in plain]
        return self.linked.get_call_template(wide, kws)

    def get_overload(self, sig: Any) -> Any:
        """What a kernel links."""
        return self.linked.get_overload(sig)

    def untranslated(self) -> set[Any]:
        """All that it calls, step by step, and that no kernel of this process has called yet."""
        found: set[Any] = set()
        left = [self]
        while left:
            code, space = (one := left.pop()).py_func.__code__, one.py_func.__globals__
            called = {space.get(name) for name in code.co_names}
            more = {one for one in called if isinstance(one, Kernel) and not one.linked.overloads}
            left += more - found
            found |= more
        return found


class _Watcher(event.Listener):
    """Shows how far a kernel is that Python calls and no cache has: it counts what that calls."""

    def __init__(self) -> None:
        self._depth, self._shown = 0, ExitStack()
        self._advance: Advance | None = None

    def on_start(self, event: Any) -> None:
        """A function is about to be compiled."""
        self._depth += 1
        kernel = event.data["dispatcher"]
        if self._depth == 1 and isinstance(kernel, Kernel):
            bar = progress(
                len(kernel.untranslated()) + 1,
                "compiling the simulator, once for this machine",
                unit="kernels",
                show=by_hand() or None,
                soon=True,
            )
            self._advance = self._shown.enter_context(bar)

    def on_end(self, event: Any) -> None:
        """It has been compiled."""
        self._depth -= 1
        kernel = event.data["dispatcher"]
        ours = str(kernel.py_func.__module__).startswith("hetero.")
        if self._advance and ours and len(kernel.overloads) == 1:
            self._advance(1)
        if self._depth == 0:
            self._advance = None
            self._shown.close()


event.register("numba:compile", _Watcher())
