#pragma once

#include <cstdio>
#include <string>

namespace longspan::test {

/// What a check found. A test fails where it is not good; a timing says so.
void report(bool good, const std::string& what);

template <class... Parts>
std::string text(const char* format, Parts... parts) {
  char buffer[512];
  std::snprintf(buffer, sizeof(buffer), format, parts...);
  return buffer;
}

}  // namespace longspan::test
