// The shortest program that still fails: runs of instructions are left out, then numbers made
// smaller, until nothing more can go.
#pragma once

#include <functional>

#include "fuzz/program.hpp"

namespace stagehand::fuzz {

// `fails` says whether a program fails; `program` does. At most `tries` programs are tried.
Program shrunk(Program program, const std::function<bool(const Program&)>& fails,
               std::size_t tries = 3000);

}  // namespace stagehand::fuzz
