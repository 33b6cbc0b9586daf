/// Trains a tiny byte-level language model of one's own in C++: layers of
/// <longspan/models.h>, packed documents, ranks that are threads.
///
///   cpp_train --text FILE [--layer mamba2|delta|glm_dsa|deepseek_v4]
///             [--ranks N] [--steps S] [--tokens T] [--type float32|float64]
///             [--start FILE] [--save FILE]
///
/// Paragraphs of the text are documents, packed into streams of T tokens. The
/// losses are the same for every N, but for rounding.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <longspan/models.h>
#include <longspan/models/layers.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace longspan;

constexpr int64_t kBytes = 256, kHidden = 64, kInner = 128, kLayers = 2;
constexpr int64_t kIgnored = -100;
constexpr uint64_t kSeed = 1;

// ---- The model.

/// The mixers have their parameters under the names of checkpoints.
class Mixer : public torch::nn::Module {
 public:
  Mixer(const std::string& kind, int64_t number) {
    if (kind == "mamba2") {
      use(std::make_shared<Mamba2Mixer>(Mamba2Config{
          .hidden = kHidden, .heads = 4, .head_dim = 32, .states = 16}));
    } else if (kind == "delta") {
      // A larger eps than usual: what small new heads find is nearly nothing,
      // and norms that blow it up make training chaotic.
      use(std::make_shared<GatedDeltaNet>(GatedDeltaConfig{.hidden = kHidden,
                                                           .key_heads = 2,
                                                           .value_heads = 4,
                                                           .key_dim = 16,
                                                           .value_dim = 32,
                                                           .eps = 1e-4}));
    } else if (kind == "glm_dsa") {
      const auto layer = register_module(
          "mixer",
          std::make_shared<GlmDsaAttention>(GlmDsaConfig{.hidden = kHidden,
                                                         .heads = 4,
                                                         .q_rank = 32,
                                                         .kv_rank = 32,
                                                         .key_dim = 16,
                                                         .rotary_dim = 8,
                                                         .value_dim = 16,
                                                         .index_heads = 8,
                                                         .index_dim = 16,
                                                         .slots = 32}));
      mix = [layer](const at::Tensor& x, const LayerShare& share) {
        return layer->forward(x, share).out;
      };
    } else if (kind == "deepseek_v4") {
      using Kind = DeepseekV4Config::Kind;
      use(std::make_shared<DeepseekV4Attention>(
          DeepseekV4Config{.kind = number % 2 == 0 ? Kind::sparse : Kind::heavy,
                           .hidden = kHidden,
                           .heads = 4,
                           .head_dim = 32,
                           .q_rank = 32,
                           .out_groups = 2,
                           .out_rank = 16,
                           .window = 16,
                           .ratio = number % 2 == 0 ? 4 : 16,
                           .index_heads = 8,
                           .index_dim = 16,
                           .slots = 8,
                           .rotary = {.channels = 16}}));
    } else {
      throw std::invalid_argument(
          "cpp_train: --layer " + kind +
          " is not one of mamba2, delta, glm_dsa, deepseek_v4");
    }
  }

  std::function<at::Tensor(const at::Tensor&, const LayerShare&)> mix;

 private:
  template <class Layer>
  void use(std::shared_ptr<Layer> layer) {
    register_module("mixer", layer);
    mix = [layer](const at::Tensor& x, const LayerShare& share) {
      return layer->forward(x, share);
    };
  }
};

class ByteModel : public torch::nn::Module {
 public:
  explicit ByteModel(const std::string& kind) {
    const auto weight = [&](const std::string& name, at::IntArrayRef sizes) {
      return register_parameter(name, at::randn(sizes) * 0.02);
    };
    embedding_ = weight("embedding", {kBytes, kHidden});
    for (int64_t i = 0; i < kLayers; ++i) {
      const std::string name = "layers_" + std::to_string(i);
      Block block;
      block.mixer = register_module(name, std::make_shared<Mixer>(kind, i));
      block.norm =
          register_parameter(name + "_mixer_norm", at::ones({kHidden}));
      block.mlp_norm =
          register_parameter(name + "_mlp_norm", at::ones({kHidden}));
      block.up = weight(name + "_up", {kInner, kHidden});
      block.down = weight(name + "_down", {kHidden, kInner});
      blocks_.push_back(block);
    }
    norm_ = register_parameter("norm", at::ones({kHidden}));
    head_ = weight("head", {kBytes, kHidden});
  }

  /// The sum of the losses of this rank's tokens.
  at::Tensor forward(const at::Tensor& bytes, const at::Tensor& labels,
                     const LayerShare& share) const {
    const auto normed = [](const at::Tensor& x, const at::Tensor& weight) {
      return at::rms_norm(x, {kHidden}, weight, 1e-6);
    };
    at::Tensor x = at::embedding(embedding_, bytes);
    for (const Block& block : blocks_) {
      x = x + block.mixer->mix(normed(x, block.norm), share);
      const at::Tensor inner =
          at::silu(at::linear(normed(x, block.mlp_norm), block.up));
      x = x + at::linear(inner, block.down);
    }
    return linear_cross_entropy(normed(x, norm_), head_, labels, std::nullopt,
                                {.ignore_index = kIgnored})
        .loss;
  }

 private:
  struct Block {
    std::shared_ptr<Mixer> mixer;
    at::Tensor norm, mlp_norm, up, down;
  };
  std::vector<Block> blocks_;
  at::Tensor embedding_, norm_, head_;
};

// ---- The text.

struct Batch {
  Packing packing;
  at::Tensor bytes, labels;  ///< int64 [tokens] of the whole stream
};

/// Paragraphs, each with at least two bytes, so that there is one to foretell.
std::vector<std::string> documents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> documents;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find("\n\n", begin), text.size());
    if (end - begin >= 2) documents.push_back(text.substr(begin, end - begin));
    begin = end + 2;
  }
  if (!file || documents.empty()) {
    throw std::runtime_error("cpp_train: --text " + path +
                             " cannot be read, or has no paragraph of two "
                             "bytes or more");
  }
  return documents;
}

/// Whole documents one after the other, the last one cut where the stream ends.
/// `next` goes on from batch to batch, and around. Streams are lengthened by
/// pads until they can be cut over the ranks.
Batch next_batch(const std::vector<std::string>& documents, std::size_t& next,
                 int64_t tokens, int ranks) {
  std::vector<int64_t> lengths, bytes, labels;
  while (std::ssize(bytes) < tokens) {
    const std::string& document = documents[next++ % documents.size()];
    const int64_t length =
        std::min(std::ssize(document), tokens - std::ssize(bytes));
    for (int64_t i = 0; i < length; ++i) {
      const auto byte = [&](int64_t at) -> int64_t {
        return static_cast<unsigned char>(
            document[static_cast<std::size_t>(at)]);
      };
      bytes.push_back(byte(i));
      labels.push_back(i + 1 < length ? byte(i + 1) : kIgnored);
    }
    lengths.push_back(length);
  }
  Batch batch;
  batch.packing = Packing::of(lengths).with_tokens_multiple_of(2 * ranks);
  bytes.resize(static_cast<std::size_t>(batch.packing.tokens()), 0);
  labels.resize(bytes.size(), kIgnored);
  batch.bytes = at::tensor(bytes, at::kLong);
  batch.labels = at::tensor(labels, at::kLong);
  return batch;
}

// ---- The step.

/// Gradients of all ranks, summed in the order of the ranks: each sums a piece,
/// and gathers those of the others.
void sum_gradients(const std::vector<at::Tensor>& parameters,
                   const Group& group) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& p : parameters) {
    const at::Tensor& own = p.grad();
    parts.push_back((own.defined() ? own : at::zeros_like(p)).flatten());
  }
  at::Tensor all = at::cat(parts);
  std::vector<int64_t> sizes;
  for (int64_t r = 0, left = all.numel(); r < group.size(); ++r) {
    sizes.push_back(left / (group.size() - r));
    left -= sizes.back();
  }
  all = reduce_scatter_tokens(all, 0, sizes, group);
  all = all_gather_tokens(all, 0, sizes, group);
  int64_t begin = 0;
  for (const at::Tensor& p : parameters) {
    p.mutable_grad() = all.narrow(0, begin, p.numel()).view_as(p);
    begin += p.numel();
  }
}

/// Adam (Kingma and Ba 2015).
class Adam {
 public:
  explicit Adam(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)) {
    for (const at::Tensor& p : parameters_) {
      means_.push_back(at::zeros_like(p));
      squares_.push_back(at::zeros_like(p));
    }
  }

  void step() {
    ++steps_;
    const double whole = 1 - std::pow(0.9, steps_);
    const double whole_square = 1 - std::pow(0.95, steps_);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& g = parameters_[i].grad();
      means_[i].mul_(0.9).add_(g, 0.1);
      squares_[i].mul_(0.95).addcmul_(g, g, 0.05);
      parameters_[i].sub_(means_[i] / whole /
                          ((squares_[i] / whole_square).sqrt() + 1e-8) * 1e-3);
      parameters_[i].mutable_grad() = at::Tensor();
    }
  }

 private:
  std::vector<at::Tensor> parameters_, means_, squares_;
  double steps_ = 0;
};

struct Options {
  std::string text, layer = "mamba2", type = "float32", start, save;
  int64_t ranks = 2, steps = 50, tokens = 512;
};

/// What every rank does: its tokens of each batch through its own copy of the
/// model, which stays that of the others.
void train(const Options& options, const std::vector<std::string>& documents,
           const ByteModel& initial, const Group& group) {
  at::set_num_threads(1);  // a tiny model has nothing to share
  ByteModel model(options.layer);
  model.to(initial.parameters()[0].scalar_type());
  const std::vector<at::Tensor> parameters = model.parameters();
  {
    const at::NoGradGuard without_gradients;
    const std::vector<at::Tensor> from = initial.parameters();
    for (std::size_t i = 0; i < from.size(); ++i) parameters[i].copy_(from[i]);
  }
  Adam adam(parameters);
  std::size_t next = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t step = 1; step <= options.steps; ++step) {
    const Batch batch =
        next_batch(documents, next, options.tokens, group.size());
    const auto owners =
        Ownership::head_tail(batch.packing.tokens(), group.size());
    const LayerShare share(
        AttentionLayout::of(owners, {Mask::causal(batch.packing)}), group);
    const at::Tensor labels = take_share(batch.labels, owners, group.rank(), 0);
    const at::Tensor sum = model.forward(
        take_share(batch.bytes, owners, group.rank(), 0), labels, share);
    const at::Tensor loss = reduce_loss(sum, labels.ne(kIgnored).sum(), group);
    loss.backward();
    const at::NoGradGuard without_gradients;
    sum_gradients(parameters, group);
    adam.step();
    if (group.rank() == 0) {
      const double seconds = std::chrono::duration<double>(
                                 std::chrono::steady_clock::now() - begin)
                                 .count();
      std::printf(
          "step %lld of %lld: loss %.12f, %lld documents, %.0f tokens/s\n",
          static_cast<long long>(step), static_cast<long long>(options.steps),
          loss.item<double>(),
          static_cast<long long>(batch.packing.documents()),
          static_cast<double>(step * options.tokens) / seconds);
      std::fflush(stdout);
    }
  }
  if (group.rank() == 0 && !options.save.empty()) {
    save_weights(model, options.save);
    std::printf("saved %s\n", options.save.c_str());
  }
}

Options options_of(int count, char** words) {
  Options options;
  const std::map<std::string, std::string*> texts = {
      {"--text", &options.text},
      {"--layer", &options.layer},
      {"--type", &options.type},
      {"--start", &options.start},
      {"--save", &options.save}};
  const std::map<std::string, int64_t*> numbers = {
      {"--ranks", &options.ranks},
      {"--steps", &options.steps},
      {"--tokens", &options.tokens}};
  for (int i = 1; i < count; i += 2) {
    const std::string name = words[i];
    const std::string value = i + 1 < count ? words[i + 1] : "";
    if (texts.count(name) > 0 && !value.empty()) {
      *texts.at(name) = value;
    } else if (numbers.count(name) > 0 &&
               value.find_first_not_of("0123456789") == std::string::npos &&
               !value.empty() && value.size() < 10 && std::stoll(value) > 0) {
      *numbers.at(name) = std::stoll(value);
    } else {
      throw std::invalid_argument(
          "cpp_train: '" + name + " " + value +
          "' is no option; expected --text FILE, --layer, --type, --start FILE "
          "or --save FILE with a word, or --ranks, --steps or --tokens with a "
          "number above 0");
    }
  }
  if (options.text.empty()) {
    throw std::invalid_argument("cpp_train: give --text FILE");
  }
  if (options.type != "float32" && options.type != "float64") {
    throw std::invalid_argument("cpp_train: --type " + options.type +
                                " is not one of float32, float64");
  }
  return options;
}

}  // namespace

int main(int count, char** words) {
  try {
    const Options options = options_of(count, words);
    const std::vector<std::string> documents = documents_of(options.text);
    at::manual_seed(kSeed);
    ByteModel initial(options.layer);
    initial.to(options.type == "float64" ? at::kDouble : at::kFloat);
    if (!options.start.empty()) load_weights(initial, options.start);
    run_ranks(static_cast<int>(options.ranks), [&](const Group& group) {
      train(options, documents, initial, group);
    });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
