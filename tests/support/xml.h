#pragma once

#include <algorithm>
#include <cctype>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/core/detail/check.h"

/// A small reader of XML: enough to say whether a file is well-formed, and to
/// look at its elements. No comments, processing instructions or DTDs.
namespace longspan::test {

struct XmlElement {
  std::string name;
  std::vector<std::pair<std::string, std::string>> attributes;
  std::string text;  ///< character data up to the first child

  std::string attribute(std::string_view key) const {
    for (const auto& [name, value] : attributes) {
      if (name == key) return value;
    }
    return "";
  }
};

struct XmlFile {
  std::string error;  ///< empty when the file is well-formed
  std::vector<XmlElement> elements;

  int64_t count(std::string_view name) const {
    return std::ranges::count(elements, name, &XmlElement::name);
  }
};

class XmlReader {
 public:
  explicit XmlReader(std::string_view text) : rest_(text), size_(text.size()) {}

  XmlFile read() {
    while (file_.error.empty() && !rest_.empty()) {
      if (rest_.starts_with("</")) {
        close_tag();
      } else if (rest_.starts_with('<')) {
        open_tag();
      } else {
        character_data();
      }
    }
    if (!open_.empty()) fail("not closed");
    if (file_.elements.empty()) fail("no root");
    return file_;
  }

 private:
  void fail(std::string_view what) {
    if (!file_.error.empty()) return;
    file_.error = join(what, " at byte ", size_ - rest_.size());
  }
  bool take(std::string_view text) {
    if (!rest_.starts_with(text)) return false;
    rest_.remove_prefix(text.size());
    return true;
  }
  void skip_spaces() {
    while (!rest_.empty() && std::isspace(byte()) != 0) rest_.remove_prefix(1);
  }
  unsigned char byte() const { return static_cast<unsigned char>(rest_[0]); }

  std::string name() {
    std::string name;
    while (!rest_.empty() && (std::isalnum(byte()) != 0 || rest_[0] == '-' ||
                              rest_[0] == ':' || rest_[0] == '_')) {
      name += rest_[0];
      rest_.remove_prefix(1);
    }
    if (name.empty() || std::isalpha(static_cast<unsigned char>(name[0])) == 0)
      fail("a name is missing");
    return name;
  }

  /// Text up to one of `ends`, entities resolved.
  std::string text_until(std::string_view ends) {
    std::string text;
    while (!rest_.empty() && ends.find(rest_[0]) == std::string_view::npos) {
      if (rest_[0] == '<') fail("'<' in text");
      if (byte() < 0x20 && rest_[0] != '\n' && rest_[0] != '\t') {
        fail("a control character");
      }
      if (rest_[0] == '&') {
        static const std::vector<std::pair<std::string, char>> entities{
            {"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}};
        const auto found = std::ranges::find_if(entities, [&](const auto& e) {
          return rest_.starts_with(e.first);
        });
        if (found == entities.end()) {
          fail("an unknown entity");
          return text;
        }
        text += found->second;
        rest_.remove_prefix(found->first.size());
        continue;
      }
      text += rest_[0];
      rest_.remove_prefix(1);
    }
    return text;
  }

  void open_tag() {
    take("<");
    if (open_.empty() && !file_.elements.empty()) fail("a second root");
    XmlElement element{name(), {}, ""};
    std::set<std::string> seen;
    while (file_.error.empty()) {
      skip_spaces();
      const bool alone = take("/>");
      if (alone || take(">")) {
        if (!alone) open_.push_back(file_.elements.size());
        file_.elements.push_back(std::move(element));
        return;
      }
      const std::string key = name();
      if (!seen.insert(key).second) fail("an attribute came twice");
      if (!take("=\"")) fail("'=\"' is missing");
      const std::string value = text_until("\"");
      if (!take("\"")) fail("a quote is missing");
      element.attributes.emplace_back(key, value);
    }
  }

  void close_tag() {
    take("</");
    const std::string closed = name();
    if (open_.empty() || file_.elements[open_.back()].name != closed) {
      fail("</" + closed + "> closes nothing");
      return;
    }
    open_.pop_back();
    if (!take(">")) fail("'>' is missing");
  }

  void character_data() {
    const std::string text = text_until("<");
    if (!open_.empty()) {
      file_.elements[open_.back()].text += text;
    } else if (text.find_first_not_of(" \n") != std::string::npos) {
      fail("text outside the root");
    }
  }

  std::string_view rest_;
  std::size_t size_;
  std::vector<std::size_t> open_;
  XmlFile file_;
};

inline XmlFile read_xml(std::string_view text) {
  return XmlReader(text).read();
}

}  // namespace longspan::test
