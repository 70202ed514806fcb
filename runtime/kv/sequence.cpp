#include "runtime/kv/sequence.h"

namespace keyhole::runtime {
namespace {

std::vector<LayerShape> shapes_of(const ModelShape& model) {
  std::vector<LayerShape> shapes;
  for (uint32_t layer = 0; layer < model.layers; ++layer) shapes.push_back(model.of(layer));
  return shapes;
}

}  // namespace

Sequence::Sequence(const Engine& engine, const SessionParams& params)
    : store_(shapes_of(engine.model()), params.offload_dtype(engine.model()), params.max_tokens,
             &engine.pool()),
      resident_(
          engine.make_resident(params.resident_shape(engine.model()), params.device_memory_limit)),
      rings_(engine, params.max_tokens, *resident_),
      staging_(engine, params.staging_tokens()),
      all_full_{&engine,           &store_,     resident_.get(), &staging_,
                params.max_tokens, params.sink, params.window,   params.flush_block,
                params.row_block()} {
  for (uint32_t layer = 0; layer < engine.model().layers; ++layer) {
    FullLayer* full = nullptr;
    if (engine.model().slides(layer)) {
      layers_.push_back(std::make_unique<SlidingLayer>(engine, layer, rings_, staging_,
                                                       all_full_.window_capacity()));
    } else {
      auto made = std::make_unique<FullLayer>(layer, all_full_);
      full = made.get();
      layers_.push_back(std::move(made));
    }
    full_.push_back(full);
  }
}

void Sequence::copy_from(const Sequence& from) {
  all_full_.row_block = from.all_full_.row_block;
  rings_.copy_from(from.rings_);
  for (size_t i = 0; i < full_.size(); ++i) {
    if (full_[i] != nullptr) full_[i]->copy_from(*from.full_[i]);
  }
}

void Sequence::save(ChecksumWriter& out) const {
  for (const FullLayer* layer : full_) {
    if (layer != nullptr) layer->save(out);
  }
  rings_.save(out);
}

void Sequence::load(ChecksumReader& in) {
  for (FullLayer* layer : full_) {
    if (layer != nullptr) layer->load(in);
  }
  rings_.load(in);
}

}  // namespace keyhole::runtime
