#include "longspan/models/safetensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "longspan/core/detail/check.h"
#include "tests/support/values.h"

namespace longspan::test {
namespace {

/// A folder of its own for each test, gone afterwards.
class Safetensors : public ::testing::Test {
 protected:
  Safetensors()
      : folder_(std::filesystem::path(::testing::TempDir()) /
                join("longspan_safetensors_", ::getpid())) {
    std::filesystem::create_directories(folder_);
  }
  ~Safetensors() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path place(const std::string& name = "some.safetensors") {
    return folder_ / name;
  }

  /// A file with this header, and so many bytes behind it.
  void write(const std::string& header, std::size_t bytes) {
    std::ofstream file(place(), std::ios::binary);
    const uint64_t length = header.size();
    file.write(reinterpret_cast<const char*>(&length), 8);
    file << header << std::string(bytes, '\0');
  }

  std::string refusal() {
    try {
      SafetensorsFile::open(place());
    } catch (const std::runtime_error& error) {
      const std::string start = "safetensors: '" + place().string() + "' ";
      const std::string text = error.what();
      EXPECT_TRUE(text.starts_with(start)) << text;
      return text.substr(std::min(text.size(), start.size()));
    }
    return "accepted";
  }

 private:
  std::filesystem::path folder_;
};

TEST_F(Safetensors, WhatIsWrittenIsRead) {
  const NamedTensors tensors = {
      {"half", at::arange(6).view({2, 3}).to(at::kHalf)},
      {"brain", at::arange(3).to(at::kBFloat16)},
      {"number", at::tensor(0.5, at::kDouble)},
      {"none", at::empty({0, 4}, at::kFloat)},
      {"turned", at::arange(6, at::kFloat).view({2, 3}).t()},
      {"whole \"\\\n\xc3\xa9", at::arange(5)},
      {"flags", at::arange(2).to(at::kBool)}};
  write_safetensors(place(), tensors, {{"format", "pt"}, {"why", "a \"b\""}});
  const auto file = SafetensorsFile::open(place());
  EXPECT_EQ(file.entries().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("why"), "a \"b\"");
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor found = file.read(name);
    EXPECT_EQ(found.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(at::equal(found, tensor)) << name;
    const auto& entry = *file.find(name);
    EXPECT_EQ(entry.begin % static_cast<int64_t>(tensor.element_size()), 0);
  }
  EXPECT_FALSE(std::filesystem::exists(place("some.safetensors.partial")));
  EXPECT_EQ(message_of([&] { file.read("other"); }),
            "safetensors: '" + place().string() + "' has no 'other'");
}

/// Each writes numbers of its own; the file is that of one of them.
TEST_F(Safetensors, ManyThreadsWriteOnePath) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < 4; ++i) {
    threads.emplace_back([this, i] {
      for (int64_t turn = 0; turn < 20; ++turn) {
        write_safetensors(place(), {{"x", at::full({20000}, i, at::kLong)}});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const at::Tensor x = SafetensorsFile::open(place()).read("x");
  EXPECT_TRUE((x == x[0]).all().item<bool>());
  const std::filesystem::directory_iterator files(place().parent_path()), none;
  EXPECT_EQ(std::distance(files, none), 1);
}

TEST_F(Safetensors, NamesMayBeEscaped) {
  write(R"({"\u0061\u00e9\ud83d\ude00\/":{"dtype":"U8","shape":[2],)"
        R"("data_offsets":[0,2]}}  )",
        2);
  const auto file = SafetensorsFile::open(place());
  EXPECT_EQ(file.entries()[0].name, "a\xc3\xa9\xf0\x9f\x98\x80/");
}

TEST_F(Safetensors, TornFilesAreRefused) {
  EXPECT_EQ(refusal(), "cannot be read: No such file or directory");
  std::ofstream(place()) << "1234";
  EXPECT_EQ(refusal(), "has 4 bytes, too few for a header");
  std::ofstream(place(), std::ios::binary) << std::string(16, '\x7f');
  EXPECT_EQ(refusal(),
            "says that its header has 9187201950435737471 bytes; there are 8, "
            "and 100000000 is the most");
  write_safetensors(place(), {{"x", at::arange(4)}});
  // Every prefix of a good file.
  const auto size = std::filesystem::file_size(place());
  for (auto left = size; left-- > 0;) {
    std::filesystem::resize_file(place(), left);
    EXPECT_NE(refusal(), "accepted") << left;
  }
}

TEST_F(Safetensors, HeadersThatMakeNoSenseAreRefused) {
  const struct {
    std::string header;
    std::string message;
  } cases[] = {
      {"[]", "cannot be used: its header has no '{' at byte 0 of 2"},
      {"{} x",
       "cannot be used: its header has something behind its end at "
       "byte 3 of 4"},
      {R"({"x":{"dtype":"F32","shape":[1]}})",
       "cannot be used: its header has 'x' without one of dtype, shape and "
       "data_offsets at byte 32 of 33"},
      {R"({"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})",
       "cannot be used: its header has no whole number at byte 29 of 55"},
      {R"({"x":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})",
       "cannot be used: its header has no ']' at byte 30 of 56"},
      {R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})",
       "has 'x' at bytes [0, 4), but F32 [2] has 8"},
      {R"({"x":{"dtype":"F32","shape":[4611686018427387904,4],)"
       R"("data_offsets":[0,0]}})",
       "has 'x' at bytes [0, 0), but F32 [4611686018427387904, 4] has too "
       "many"},
      {R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "has 'x' at bytes [4, 8) where the tensors before it end at 0"},
      {R"({"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
       R"("y":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
       "has 'y' at bytes [2, 4) where the tensors before it end at 3"},
      {R"({"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})",
       "has 4 bytes of tensors, but its header lists 3; it was torn or "
       "something was added"},
      {R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("x":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})",
       "cannot be used: its header has 'x' a second time at byte 57 of 105"},
      {R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"more":[1]}})",
       "cannot be used: its header has 'more' of 'x'; expected dtype, shape "
       "and data_offsets at byte 59 of 64"},
      {R"({"\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       "cannot be used: its header has half of a character at byte 8 of 58"},
  };
  for (const auto& [header, message] : cases) {
    write(header, 4);
    EXPECT_EQ(refusal(), message) << header;
  }
}

TEST_F(Safetensors, UnknownTypesAreRefusedWhenTheyAreRead) {
  write(R"({"x":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}})", 4);
  const auto file = SafetensorsFile::open(place());
  try {
    file.read("x");
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()),
              "safetensors: '" + place().string() +
                  "' has 'x' as F4, which is no type of torch");
  }
}

TEST_F(Safetensors, AFailedWriteLeavesTheOldFile) {
  EXPECT_EQ(message_of([&] {
              write_safetensors(place(),
                                {{"x", at::arange(2)}, {"x", at::arange(3)}});
            }),
            "write_safetensors: 'x' cannot be the name of a tensor: it came "
            "before, or is reserved");
  EXPECT_THROW(write_safetensors(place("no/such/folder"), {}),
               std::runtime_error);
  EXPECT_FALSE(std::filesystem::exists(place()));
}

}  // namespace
}  // namespace longspan::test
