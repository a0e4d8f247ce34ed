// Writes the draws of one chain into a store.
//
// Note [Stores]
// A store is a folder with a folder for each chain, "chain-0" and so on, which
// holds an index (host/draw_index.h), a file for each draw or for many small
// ones (host/draw_layout.h), and the file that its one writer has locked. A
// draw's bytes are whole and synced before the index names it; the index says
// what is dropped before files are deleted. So whatever ends a process, the
// index names whole draws only, and what it does not name is no part of the
// store. A file that draws share is deleted with the last of them, and never
// while it is the one that grows: so an unbroken run and one that was resumed
// have the same files.
//
// A checkpoint of a run remembers how long the index was. To resume there, the
// index is cut to that length, and what is not in it is deleted. Draws that are
// dropped after a checkpoint are in it again then, so their files stay until
// the next but one checkpoint: by then the next one is on the disk.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "host/draw_index.h"
#include "host/draw_layout.h"
#include "store/disk.h"

namespace torch_sgmcmc {

// Where an index was when a checkpoint was made.
struct StorePosition {
  uint64_t size = 0;
  uint32_t crc32 = 0;
};

class ChainWriter {
 public:
  // Locks the chain, which is made if it is not there. Throws
  // std::invalid_argument if the store is of another model, std::runtime_error
  // if it cannot be written or somebody else writes.
  ChainWriter(const std::string& store,
              int64_t chain,
              const DrawLayout& layout);
  ~ChainWriter();
  ChainWriter(const ChainWriter&) = delete;
  ChainWriter(ChainWriter&&) = delete;
  ChainWriter& operator=(const ChainWriter&) = delete;
  ChainWriter& operator=(ChainWriter&&) = delete;

  // Throws std::invalid_argument if it has draws of an earlier run: CutBack()
  // or Restart() comes first.
  void Check() const;
  // These two may be asked while another thread writes.
  size_t num_draws() const;
  std::optional<DrawRecord> last() const;
  const DrawLayout& layout() const { return index_.layout; }
  const std::string& folder() const { return folder_; }

  // Stores a draw: the memory of each tensor, in the layout's order. If it
  // throws, the chain is as before.
  void Append(DrawRecord record, const std::vector<const void*>& tensors);
  // Drops draws whose number is no multiple.
  void Thin(int64_t interval);

  // Where the chain is, for a checkpoint; see Note [Stores].
  StorePosition Checkpoint();
  // Goes back to a checkpoint. Returns the numbers of draws that are lost, as
  // checkpoints were made since. Throws std::invalid_argument if it is not of
  // this chain, which is then as before.
  std::vector<int64_t> CutBack(const StorePosition& position);
  // Deletes all draws.
  void Restart();
  // Lets others write; nothing can be stored any more.
  void Close();

 private:
  struct Dropped {
    DrawRecord record;
    uint64_t by = 0;  // how long the index was then
  };
  // Where the next draw goes.
  void Place(DrawRecord& record) const;
  void WriteDraw(const DrawRecord& record,
                 const std::vector<disk::Piece>& pieces);
  void AppendToIndex(const std::string& line);
  void CutTo(uint64_t size);
  void DeleteDropped(uint64_t by);
  bool IsThere(const DrawRecord& record) const;

  std::string folder_;
  std::string place_;
  std::unique_ptr<disk::Lock> lock_;
  disk::Tail tail_;
  // The file that draws share and that grows, and its name.
  disk::Tail shared_;
  std::string shared_name_;
  // That was stored last, though it may be dropped.
  std::optional<DrawRecord> newest_;
  DrawIndex index_;
  mutable std::mutex mutex_;  // of index_.draws
  std::string text_;          // of the index
  std::vector<Dropped> dropped_;
  bool has_checkpoint_ = false;
  uint64_t checkpoint_ = 0;
  bool undecided_ = false;
};

// Of a store: the numbers of its chains, sorted; none where there is no folder.
std::vector<int64_t> ChainsIn(const std::string& store);
std::string ChainFolder(const std::string& store, int64_t chain);
// Throws std::runtime_error, also if the index's head is damaged.
DrawIndex ReadIndex(const std::string& store, int64_t chain);

}  // namespace torch_sgmcmc
