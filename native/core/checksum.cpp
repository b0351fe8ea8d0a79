#include "core/checksum.hpp"

#include <array>
#include <cstring>

namespace stagehand::core {

namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// Table k advances a byte over k more bytes, so that eight are looked up at once ("slicing by 8").
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    }
    tables[0][i] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t i = 0; i < 256; ++i) {
      const std::uint32_t before = tables[k - 1][i];
      tables[k][i] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const std::byte* data, Bytes bytes) {
  crc = ~crc;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, 8);
    word ^= crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) {
      crc ^= kTables[7 - k][word >> 8 * k & 0xFF];
    }
  }
  for (; bytes > 0; ++data, --bytes) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<std::uint32_t>(*data)) & 0xFF];
  }
  return ~crc;
}

}  // namespace stagehand::core
