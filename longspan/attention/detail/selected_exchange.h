#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "longspan/attention/detail/rank_layout.h"
#include "longspan/attention/fetch.h"
#include "longspan/comm/detail/carry.h"
#include "longspan/comm/group.h"

namespace longspan {

/// Who exchanges, in which layout, and for what.
struct Traffic {
  Group group;
  /// Null where one rank holds the stream as it lies.
  std::shared_ptr<const RankLayout> layout;
  std::string purpose;  ///< "selected attention forward"

  /// Whether everything is here already, in the order of the stream.
  bool is_here() const {
    return group.size() == 1 &&
           (layout == nullptr || layout->to_stream().is_identity());
  }

  /// One in which ranks with other layouts take no part.
  Errand errand(const std::string& what) const;
};

/// The tokens of all ranks in the order of the stream: [local tokens, ..] ->
/// [tokens, ..], in one exchange. `mine` itself where one rank holds all.
at::Tensor gather_stream(const at::Tensor& mine, const Traffic& traffic,
                         const std::string& what);

/// The adjoint: [tokens, ..] -> [local tokens, ..], this rank's part of the
/// sum over all ranks, added in their order and in the type that came.
at::Tensor sum_home(const at::Tensor& found, const Traffic& traffic,
                    const std::string& what);

/// Several kinds of keys together, [local tokens, rows, channels] each: as rows
/// of the stream, [rows, tokens, channels] each. One exchange, in which a token
/// is one run of bytes; so they have one type.
std::vector<at::Tensor> gather_rows(const std::vector<at::Tensor>& mine,
                                    const Traffic& traffic,
                                    const std::string& what);

/// Rows of keys for the lists of this rank's queries, [tokens, rows, channels]
/// on their owners.
///
/// Needed rows are asked for by an exchange of counts and one of places, and
/// lie here one after another, whatever row of the batch they came from; so
/// lists and queries of all rows become those of one. Every row is sent once to
/// each rank that asked for it.
class FetchedKeys {
 public:
  /// lists: int32 or int64 [rows, queries, .., slots], tokens of the stream;
  /// those outside of it are empty slots. Asks for rows where `fetch` says so.
  FetchedKeys(const at::Tensor& lists, Fetch fetch, Traffic traffic);

  /// [rows, keys, channels] of each kind of keys, in one exchange; views where
  /// nothing had to move.
  std::vector<at::Tensor> rows_of(const std::vector<at::Tensor>& mine,
                                  const std::string& what) const;

  /// The lists, as places in what rows_of() returns.
  const at::Tensor& lists() const { return lists_; }

  /// Queries as the lists have them: the rows of a batch end to end, or x.
  at::Tensor queries(const at::Tensor& x) const;

  /// The gradients of rows_of(): [tokens, rows, channels] of this rank's
  /// tokens, added in the order of the ranks and in the type that came.
  std::vector<at::Tensor> home(const std::vector<at::Tensor>& found,
                               const std::string& what) const;

 private:
  void ask(const at::Tensor& lists);

  bool is_needed_ = false;
  Traffic traffic_;
  at::Tensor lists_;
  int64_t rows_ = 1;
  // Of needed rows: from places of ours to those of who asked.
  std::vector<Piece> pieces_;
  int64_t needed_ = 0;  // rows that come here
};

}  // namespace longspan
