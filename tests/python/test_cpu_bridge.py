"""The bridge for torch's CPU tensors needs no compiler, and refuses a torch it does not know."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagehand_alloc import testing

# c10's CPU allocator as torch 2.11 to 2.14 have it, but for one change.
LIKE_C10 = """
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
namespace c10 {
using Deleter = void (*)(void*);
struct Device { std::int8_t type = 0, index = -1; };
struct DataPtr { EARLIER void* data; std::unique_ptr<void, Deleter> context; Device device; };
struct Allocator {
  virtual ~Allocator() = default;
  virtual DataPtr allocate(std::size_t) = 0;
  virtual bool is_simple_data_ptr(const DataPtr&) const;
  virtual Deleter raw_deleter() const { return nullptr; }
  virtual void copy_data(void*, const void*, std::size_t) const = 0;
  LATER
};
bool Allocator::is_simple_data_ptr(const DataPtr&) const { return true; }
struct Default : Allocator {
  DataPtr allocate(std::size_t bytes) override {
    DataPtr made{BEFORE nullptr, {nullptr, &std::free}, {}};
    made.data = std::malloc(bytes);
    made.context.reset(made.data);
    return made;
  }
  Deleter raw_deleter() const override { return &std::free; }
  void copy_data(void*, const void*, std::size_t) const override {}
};
Default the_default;
Allocator* the_allocator = &the_default;
Allocator* GetCPUAllocator() { return the_allocator; }
void SET(Allocator* allocator, std::uint8_t) { the_allocator = allocator; }
void* alloc_cpu(std::size_t bytes) { return std::malloc(bytes); }
void free_cpu(void* pointer) { std::free(pointer); }
}  // namespace c10
"""
SAME = {"EARLIER": "", "BEFORE": "", "LATER": "", "SET": "SetCPUAllocator"}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"SET": "SetTheCPUAllocator"}, "another name"),
        ({"LATER": "virtual void more() {}"}, "other functions"),
        ({"EARLIER": "void* more;", "BEFORE": "nullptr,"}, "another layout"),
    ],
    ids=["the same", "another name", "a function more", "a field more"],
)
def test_a_torch_with_another_allocator_is_refused_in_words(
    changed: dict[str, str], why: str | None, tmp_path: Path, run_fresh: Callable[..., Any]
) -> None:
    text = LIKE_C10
    for word, with_it in {**SAME, **changed}.items():
        text = text.replace(word, with_it)
    (tmp_path / "c10.cpp").write_text(text)
    subprocess.run(
        [
            "c++",
            "-std=c++20",
            "-fPIC",
            "-shared",
            "c10.cpp",
            "-Wl,-soname,libc10.so",
            "-o",
            "libc10.so",
        ],
        cwd=tmp_path,
        check=True,
    )
    done = run_fresh(f"""
        import ctypes
        c10 = ctypes.CDLL("{tmp_path}/libc10.so")
        sim = ctypes.CDLL("{testing.library_path()}")
        sim.stagehand_cpu_install.restype = ctypes.c_char_p
        print(sim.stagehand_cpu_install(None, None))
    """)
    assert (why is None) == (done.stdout.strip() == "None"), done.stdout
    assert why is None or why in done.stdout


def test_no_compiler_is_needed(
    run_fresh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    run_fresh("""
        import torch
        import stagehand_alloc
        from stagehand_alloc import testing

        with testing.simulated_gpu(memory="64MiB") as gpu:
            weight = torch.randn(1000, requires_grad=True)
            with stagehand_alloc.pool(high="8MiB"):
                loss = (weight.sin().cos() * weight).sum()
            loss.backward()
            assert gpu.mapped_bytes() > 0 and gpu.hazards() == []
    """)
