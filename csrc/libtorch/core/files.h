// Files that are whole: what is written is there after a power cut, and what is
// read has the bits that were written.
#pragma once

#include <string>
#include <vector>

namespace torch_sgmcmc {

/// Writes a file, all of it or nothing. Its bytes are on the disk before it
/// takes the place of an older one, and so is its name before this returns.
/// Throws std::runtime_error.
void WriteWhole(const std::string& path, const std::vector<char>& bytes);

/// Reads a file. Throws std::runtime_error.
std::vector<char> ReadWhole(const std::string& path);

/// Checks the sums that a zip archive has of its parts, which torch's reader
/// does not look at. Throws std::runtime_error that says what is wrong. A sum
/// of 0 is one that torch was told not to make (set_crc32_options(False)).
void CheckArchive(const std::vector<char>& bytes);

}  // namespace torch_sgmcmc
