#include <charconv>
#include <cstdint>
#include <limits>
#include <set>
#include <stdexcept>

#include "longspan/core/detail/check.h"
#include "longspan/models/detail/safetensors_header.h"

namespace longspan {

namespace {

void append_utf8(std::string& text, uint32_t code) {
  const auto byte = [&](uint32_t b) { text.push_back(static_cast<char>(b)); };
  if (code < 0x80) return byte(code);
  if (code < 0x800) {
    byte(0xC0 | code >> 6);
  } else if (code < 0x10000) {
    byte(0xE0 | code >> 12);
    byte(0x80 | (code >> 6 & 0x3F));
  } else {
    byte(0xF0 | code >> 18);
    byte(0x80 | (code >> 12 & 0x3F));
    byte(0x80 | (code >> 6 & 0x3F));
  }
  byte(0x80 | (code & 0x3F));
}

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  SafetensorsHeader header() {
    SafetensorsHeader found;
    std::set<std::string> names;
    object([&](const std::string& name) {
      if (!names.insert(name).second) fail(join("'", name, "' a second time"));
      if (name == "__metadata__") {
        object([&](const std::string& key) {
          if (!found.metadata.emplace(key, string()).second) {
            fail(join("'", key, "' a second time"));
          }
        });
      } else {
        found.entries.push_back(entry(name));
      }
    });
    skip();
    if (at_ != text_.size()) fail("something behind its end");
    return found;
  }

 private:
  SafetensorsFile::Entry entry(const std::string& name) {
    SafetensorsFile::Entry made{.name = name, .type = {}, .sizes = {}};
    std::set<std::string> keys;
    object([&](const std::string& key) {
      if (!keys.insert(key).second) fail(join("'", key, "' a second time"));
      if (key == "dtype") {
        made.type = string();
      } else if (key == "shape") {
        made.sizes = numbers();
      } else if (key == "data_offsets") {
        const std::vector<int64_t> offsets = numbers();
        if (offsets.size() != 2) fail("two data_offsets expected");
        made.begin = offsets[0];
        made.end = offsets[1];
      } else {
        fail(join("'", key, "' of '", name,
                  "'; expected dtype, shape and data_offsets"));
      }
    });
    if (keys.size() != 3) {
      fail(join("'", name, "' without one of dtype, shape and data_offsets"));
    }
    return made;
  }

  template <class Member>
  void object(const Member& member) {
    expect('{');
    if (took('}')) return;
    do {
      const std::string key = string();
      expect(':');
      member(key);
    } while (took(','));
    expect('}');
  }

  std::vector<int64_t> numbers() {
    std::vector<int64_t> found;
    expect('[');
    if (took(']')) return found;
    do {
      skip();
      int64_t number = -1;
      const char* const begin = text_.data() + at_;
      const char* const end = text_.data() + text_.size();
      const auto [behind, error] = std::from_chars(begin, end, number);
      const bool zeros = behind - begin > 1 && *begin == '0';
      if (error != std::errc() || number < 0 || zeros) {
        fail("no whole number");
      }
      at_ += static_cast<std::size_t>(behind - begin);
      found.push_back(number);
    } while (took(','));
    expect(']');
    return found;
  }

  std::string string() {
    expect('"');
    std::string found;
    while (true) {
      if (at_ == text_.size()) fail("a name without an end");
      const char c = text_[at_++];
      if (c == '"') return found;
      if (static_cast<unsigned char>(c) < 0x20) fail("a name with a break");
      if (c != '\\') {
        found.push_back(c);
        continue;
      }
      if (at_ == text_.size()) fail("a name without an end");
      static constexpr std::string_view kFrom = "\"\\/bfnrt",
                                        kTo = "\"\\/\b\f\n\r\t";
      const char escaped = text_[at_++];
      if (escaped == 'u') {
        append_utf8(found, unicode());
      } else if (const auto i = kFrom.find(escaped); i != kFrom.npos) {
        found.push_back(kTo[i]);
      } else {
        fail("an unknown escape");
      }
    }
  }

  uint32_t unit() {
    uint32_t code = 0;
    if (text_.size() - at_ < 4) fail("a name without an end");
    const char* const begin = text_.data() + at_;
    if (std::from_chars(begin, begin + 4, code, 16).ptr != begin + 4) {
      fail("an unknown escape");
    }
    at_ += 4;
    return code;
  }

  uint32_t unicode() {
    const uint32_t first = unit();
    if (first < 0xD800 || first > 0xDFFF) return first;
    if (first > 0xDBFF || text_.substr(at_, 2) != "\\u") {
      fail("half of a character");
    }
    at_ += 2;
    const uint32_t second = unit();
    if (second < 0xDC00 || second > 0xDFFF) fail("half of a character");
    return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
  }

  void skip() {
    while (at_ < text_.size() &&
           std::string_view(" \t\r\n").find(text_[at_]) != std::string::npos) {
      ++at_;
    }
  }

  bool took(char c) {
    skip();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    if (!took(c)) fail(join("no '", c, "'"));
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(
        join("its header has ", what, " at byte ", at_, " of ", text_.size()));
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

std::string quoted(const std::string& text) {
  std::string made = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      static constexpr const char* kDigits = "0123456789abcdef";
      made += "\\u00";
      made += kDigits[c >> 4];
      made += kDigits[c & 15];
    } else {
      if (c == '"' || c == '\\') made += '\\';
      made += c;
    }
  }
  return made + "\"";
}

}  // namespace

SafetensorsHeader read_header(std::string_view text) {
  return Reader(text).header();
}

std::string write_header(const SafetensorsHeader& header) {
  std::string text = "{";
  const auto member = [&](const std::string& name) {
    if (text.back() != '{') text += ",";
    text += quoted(name) + ":";
  };
  if (!header.metadata.empty()) {
    member("__metadata__");
    text += "{";
    for (const auto& [key, value] : header.metadata) {
      member(key);
      text += quoted(value);
    }
    text += "}";
  }
  for (const SafetensorsFile::Entry& entry : header.entries) {
    member(entry.name);
    text += "{\"dtype\":" + quoted(entry.type) + ",\"shape\":[";
    for (std::size_t i = 0; i < entry.sizes.size(); ++i) {
      text += join(i == 0 ? "" : ",", entry.sizes[i]);
    }
    text += join("],\"data_offsets\":[", entry.begin, ",", entry.end, "]}");
  }
  return text + "}";
}

}  // namespace longspan
