"""Everything that can be asked for wrongly: one clear error, and the process goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stagehand_alloc
from stagehand_alloc import _driver, testing
from stagehand_alloc._settings.config import check_mode
from stagehand_alloc._torch_side import install as _install
from stagehand_alloc._torch_side import modes as _modes

if TYPE_CHECKING:
    from stagehand_alloc.testing import SimulatedGpu

MIB = 1 << 20


def two_lines(error: BaseException) -> str:
    """The message, after checking its form: what happened, then what to do."""
    text = str(error)
    what, _, todo = text.partition("\n")
    assert what.endswith((".", ":"))
    assert todo
    return text


def assert_training_works() -> None:
    """A step in a fresh pool has the gradient of plain torch."""
    x = torch.linspace(0, 1, 4096, requires_grad=True)
    with stagehand_alloc.pool():
        y = torch.sin(x).exp()
    y.sum().backward()
    expected = torch.cos(x.detach()) * torch.sin(x.detach()).exp()
    assert x.grad is not None
    assert torch.allclose(x.grad, expected)


# --- sizes


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"high": "1GiB", "low": "2GiB"}, "low"),
        ({"high": 0.5, "low": 0.9}, "low"),
        ({"high": "512MiB", "low": 0.9}, "low"),
        ({"high": "2GiB"}, "the device has 1.00 GiB"),
        ({"limit": "2GiB"}, "the device has 1.00 GiB"),
        ({"high": "1GiB", "limit": "512MiB"}, "limit"),
        ({"high": "much"}, "high='much'"),
        ({"low": 1.5}, "low=1.5"),
        ({"limit": -1}, "limit=-1"),
        ({"high": True}, "high=True"),
    ],
)
def test_a_wrong_size_is_refused_before_the_step_begins(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(stagehand_alloc.SizeError) as caught:
        stagehand_alloc.pool(**arguments)
    assert words in two_lines(caught.value)
    assert_training_works()


def test_texts_are_checked_without_a_device_too() -> None:
    with pytest.raises(stagehand_alloc.SizeError):
        stagehand_alloc.pool(high="20XB")
    with pytest.raises(stagehand_alloc.SizeError):
        stagehand_alloc.pool(high="1GiB", low="2GiB")


# --- modes and installation


def test_the_process_allocators_mode_without_it_names_the_two_lines() -> None:
    pool = stagehand_alloc.pool(high="1GiB", mode="allocator")
    with pytest.raises(stagehand_alloc.ModeError) as caught, pool:
        pass
    assert _install.TWO_LINES in two_lines(caught.value)


@pytest.mark.parametrize("mode", ["mempool", "native"])
def test_the_other_modes_under_the_process_allocator_are_refused(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_install, "is_installed", lambda: True)
    with pytest.raises(stagehand_alloc.ModeError, match="process allocator is installed") as caught:
        _modes.resolve(check_mode(mode))
    assert 'mode="allocator"' in two_lines(caught.value)


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(stagehand_alloc.ModeError, match="'fast'"):
        stagehand_alloc.pool(mode="fast")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
@pytest.mark.parametrize("mode", ["mempool", "native", None])
def test_a_pool_on_torchs_own_allocator_needs_a_cuda_build(mode: str | None) -> None:
    pool = stagehand_alloc.pool(high="1GiB", mode=mode)
    with pytest.raises(stagehand_alloc.NoCudaBuildError, match="without CUDA") as caught, pool:
        pass
    assert "simulated_gpu" in two_lines(caught.value)


def test_a_disabled_pool_does_nothing_and_needs_nothing() -> None:
    pool = stagehand_alloc.pool(config={"enabled": False})
    with pool, pool:
        y = torch.ones(3, requires_grad=True) * 2
    y.sum().backward()
    assert pool.stats() == stagehand_alloc.PoolStats()


def test_a_keep_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(stagehand_alloc.ConfigError, match="keep=3"):
        stagehand_alloc.pool(keep=3)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_named() -> None:
    with pytest.raises(stagehand_alloc.NoCudaBuildError, match="without CUDA") as caught:
        stagehand_alloc.allocator()
    assert "simulated_gpu" in two_lines(caught.value)


@pytest.mark.parametrize("version", ["2.10.1+cu128", "1.13.0"])
def test_a_torch_that_is_too_old_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for enter in (stagehand_alloc.pool().__enter__, stagehand_alloc.allocator):
        with pytest.raises(stagehand_alloc.TorchTooOldError, match=r"needs 2\.11") as caught:
            enter()
        assert version in two_lines(caught.value)


@pytest.mark.parametrize("version", ["2.11.0a0+nv25.3", "2.13.0+cpu", "3.0"])
def test_a_preview_of_the_oldest_torch_is_new_enough(version: str) -> None:
    _install.require_torch(SimpleNamespace(__version__=version))


class FakeTorch(SimpleNamespace):
    """As much of a CUDA torch as `allocator` looks at before it builds anything."""

    def __init__(self, *, initialised: bool = False, backend: str = "native") -> None:
        super().__init__(
            __version__="2.11.0",
            version=SimpleNamespace(cuda="13.0"),
            _C=SimpleNamespace(_cuda_customAllocator=None, _cuda_getAllocator=lambda: self.current),
            cuda=SimpleNamespace(
                is_initialized=lambda: initialised,
                memory=SimpleNamespace(get_allocator_backend=lambda: backend),
            ),
            current=None,
        )


def test_too_late_says_which_calls_initialise_cuda() -> None:
    with pytest.raises(stagehand_alloc.AllocatorTooLateError) as caught:
        _install._check_installable(FakeTorch(initialised=True))
    message = two_lines(caught.value)
    for call in ("pin_memory", "set_device", "mem_get_info", "is_bf16_supported"):
        assert call in message


def test_twice_says_so_even_though_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_like = FakeTorch(initialised=True, backend="pluggable")
    with pytest.raises(stagehand_alloc.AlreadyInstalledError, match="Another pluggable"):
        _install._check_installable(torch_like)
    torch_like.current = object()
    monkeypatch.setattr(_install._installed, "ours", torch_like.current)
    with pytest.raises(stagehand_alloc.AlreadyInstalledError, match="installed already"):
        _install._check_installable(torch_like)


@pytest.mark.usefixtures("gpu")
def test_installing_on_the_simulated_gpu_says_it_is_not_needed() -> None:
    with pytest.raises(stagehand_alloc.InstallError, match="simulated"):
        stagehand_alloc.allocator()


# --- the driver


class FakeDriver:
    """cuda-python's driver module, as a machine of a certain kind would show it."""

    def __init__(self, *, version: int = 13000, devices: int = 1, missing: str = "") -> None:
        self._version, self._devices, self._missing = version, devices, missing
        self.asked: list[tuple[str, int]] = []

    def cuInit(self, flags: int) -> tuple[int]:  # noqa: N802
        return (0,)

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return 0, self._version

    def cuDeviceGetCount(self) -> tuple[int, int]:  # noqa: N802
        return 0, self._devices

    def cuGetProcAddress(  # noqa: N802
        self, name: bytes, version: int, flags: int
    ) -> tuple[int, int]:
        self.asked.append((name.decode(), version))
        return 0, 0 if name.decode() == self._missing else 4096

    def cuDeviceGet(self, index: int) -> tuple[int, int]:  # noqa: N802
        return (0, index) if index < self._devices else (101, 0)

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"Old GPU\0\0"

    def cuDeviceTotalMem(self, device: int) -> tuple[int, int]:  # noqa: N802
        return 0, 8 << 30

    def CUdevice_attribute(self, number: int) -> int:  # noqa: N802
        return number

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:  # noqa: N802
        return 0, 0


def use(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    monkeypatch.setattr(_driver, "_bindings", lambda: driver)


def test_no_driver_is_a_typed_error_with_a_line_that_helps(run_fresh: Callable[..., Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    run_fresh("""
        from stagehand_alloc import DriverNotFoundError, _driver
        try:
            _driver.start()
        except DriverNotFoundError as error:
            exec(error.todo.split("begin the script with: ")[1])
            _driver.start()
        else:
            raise SystemExit("no error")
    """)


def test_an_old_driver_is_named_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDriver(version=11080))
    with pytest.raises(stagehand_alloc.DriverTooOldError, match=r"11\.8.*12\.0") as caught:
        _driver.device_count()
    two_lines(caught.value)


def test_a_driver_that_lacks_a_function_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDriver(missing="cuMemMap"))
    with pytest.raises(stagehand_alloc.DriverTooOldError, match="cuMemMap"):
        _driver._address("cuMemMap", 12000)


def test_a_driver_may_lack_an_optional_function(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDriver(missing="cuMemcpyBatchAsync"))
    assert _driver._address("cuMemcpyBatchAsync", 13000) == 0


def test_only_a_driver_that_knows_its_form_is_asked_for_an_optional_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    use(monkeypatch, driver)
    assert _driver._address("cuMemcpyBatchAsync", 12090) == 0
    assert driver.asked == []
    assert _driver._address("cuMemcpyBatchAsync", 13020) == 4096
    assert _driver._address("cuStreamWaitValue64", 13020) == 4096
    assert driver.asked == [("cuMemcpyBatchAsync", 13000), ("cuStreamWaitValue64", 12000)]


def test_a_driver_without_devices_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDriver(devices=0))
    with pytest.raises(stagehand_alloc.DriverNotFoundError, match="0 devices") as caught:
        _driver.device_count()
    two_lines(caught.value)


def test_a_device_without_virtual_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDriver())
    with pytest.raises(stagehand_alloc.VirtualMemoryError, match="Old GPU") as caught:
        _driver.require_virtual_memory(0)
    two_lines(caught.value)


def test_a_failed_driver_call_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDriver())
    with pytest.raises(stagehand_alloc.DriverError, match=r"cuDeviceGet .*101"):
        _driver.device(7)


# --- pools


@pytest.mark.usefixtures("gpu")
def test_nested_pools_are_refused_and_the_outer_one_goes_on() -> None:
    outer, inner = stagehand_alloc.pool(), stagehand_alloc.pool()
    x = torch.ones(1000, requires_grad=True)
    with outer:
        with pytest.raises(stagehand_alloc.NestedPoolError, match="another pool") as caught, inner:
            pass
        two_lines(caught.value)
        with pytest.raises(stagehand_alloc.NestedPoolError, match="itself"), outer:
            pass
        y = torch.sin(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.cos(x.detach()))
    with inner:
        pass


def in_thread(action: Callable[[], None]) -> BaseException | None:
    raised: list[BaseException | None] = [None]

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("same", [True, False], ids=["one pool", "two pools"])
def test_two_threads_at_once_are_refused(same: bool) -> None:
    pool = stagehand_alloc.pool()
    other = pool if same else stagehand_alloc.pool()

    def enter() -> None:
        with other:
            pass

    with pool:
        error = in_thread(enter)
    assert isinstance(error, stagehand_alloc.PoolThreadError)
    two_lines(error)
    assert in_thread(enter) is None  # one after the other is fine
    assert_training_works()


@pytest.mark.usefixtures("gpu")
def test_a_pool_is_not_left_on_another_thread() -> None:
    pool = stagehand_alloc.pool()
    with pool:
        error = in_thread(lambda: pool.__exit__(None, None, None))
    assert isinstance(error, stagehand_alloc.PoolThreadError)
    with pytest.raises(stagehand_alloc.PoolError, match="not entered"):
        pool.__exit__(None, None, None)
    assert_training_works()


@pytest.mark.usefixtures("gpu")
def test_a_pool_that_cannot_be_entered_leaves_nothing_behind() -> None:
    pool = stagehand_alloc.pool()
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
        pool,
    ):
        pass
    with pool:
        pass
    assert_training_works()


@pytest.mark.usefixtures("gpu")
def test_an_exception_inside_leaves_the_hooks() -> None:
    seen: list[int] = []

    def count(info: Any) -> bool:
        seen.append(1)
        return False

    def fail_inside() -> None:
        with stagehand_alloc.pool(keep=count):
            torch.sin(torch.ones(8, requires_grad=True))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    inside = len(seen)
    torch.sin(torch.ones(8, requires_grad=True))
    assert len(seen) == inside


# --- the simulated GPU and its processes


@pytest.mark.usefixtures("gpu")
def test_a_second_simulated_gpu_names_the_first() -> None:
    with pytest.raises(stagehand_alloc.SimulatorError, match="running") as caught:
        testing.simulated_gpu(memory="3GiB")
    two_lines(caught.value)


def test_a_loaded_driver_is_found_by_its_name(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 1  /usr/lib/libcuda.so.535.1\n"
        "7f02-7f03 r-xp 00000000 08:01 2  /usr/lib/libcudart.so.13\n"
        "7f04-7f05 rw-p 00000000 00:00 0\n"
    )
    assert testing.loaded_drivers(maps) == ["/usr/lib/libcuda.so.535.1"]


def test_an_unknown_fault_is_refused(gpu: SimulatedGpu) -> None:
    with pytest.raises(stagehand_alloc.SimulatorError, match="cuMakeCoffee"):
        gpu.fail("cuMakeCoffee")


def test_no_compiler_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from stagehand_alloc._built import build as _build
    from stagehand_alloc._built import tensors as _tensors

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(stagehand_alloc.CompilerError, match="No C\\+\\+ compiler"):
        _build.build(_tensors.LIBRARY)


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from stagehand_alloc._built import build as _build
    from stagehand_alloc._built import tensors as _tensors

    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(stagehand_alloc.CompilerError, match="no such header"):
        _build.build(_tensors.LIBRARY)
    assert list((tmp_path / "stagehand_alloc").glob("*.so")) == []


def test_fork_after_use_is_an_error_in_the_child_only(run_fresh: Callable[..., Any]) -> None:
    run_fresh("""
        import os
        import stagehand_alloc
        import torch
        from stagehand_alloc import testing

        def step():
            x = torch.ones(1000, requires_grad=True)
            with stagehand_alloc.pool():
                y = torch.sin(x)
            y.sum().backward()
            assert torch.equal(x.grad, torch.cos(x.detach()))

        testing.simulated_gpu(memory="64MiB")
        held = torch.ones(1000)
        step()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                step()
            except stagehand_alloc.ForkedError as error:
                code = 0 if "spawn" in str(error) else 2
            del held
            assert torch.ones(10).sum() == 10
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        step()
        assert float(held.sum()) == 1000
    """)
