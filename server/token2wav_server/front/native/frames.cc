#include "frames.h"

#include <cstring>

#include "text.h"
#include "triton_api.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are copied as they are");

namespace token2wav {
namespace {

constexpr uint8_t REQUEST = 1, CANCELLED = 2, READY = 16, AUDIO = 17, FINISHED = 18, FAILED = 19;

constexpr size_t LEAST_ROOM = 64 << 10;
// A large frame leaves a large storage, which is given back above this size.
constexpr size_t LARGEST_IDLE_STORAGE = 1 << 20;

template <class Number>
void append(std::string& out, Number number) {
    out.append(reinterpret_cast<const char*>(&number), sizeof number);
}

uint64_t buffer_bytes(const Tensor& tensor) {
    uint64_t bytes = 0;
    for (std::string_view buffer : tensor.buffers) bytes += buffer.size();
    return bytes;
}

// Reads the parts of a frame, one after the other.
class Reader {
public:
    explicit Reader(std::string_view rest) : rest_(rest) {}

    std::string_view bytes(uint64_t count) {
        if (count > rest_.size()) throw FrameError("a frame ends too early");
        std::string_view taken = rest_.substr(0, count);
        rest_.remove_prefix(count);
        return taken;
    }

    template <class Number>
    Number number() {
        Number value;
        std::memcpy(&value, bytes(sizeof value).data(), sizeof value);
        return value;
    }

    std::string_view text(uint64_t count) {
        std::string_view value = bytes(count);
        if (!is_utf8(value)) throw FrameError("a text is not UTF-8");
        return value;
    }

    Tensor tensor() {
        Tensor tensor;
        tensor.name = text(number<uint8_t>());
        tensor.datatype = number<uint8_t>();
        tensor.shape.resize(number<uint8_t>());
        for (int64_t& dimension : tensor.shape) dimension = number<int64_t>();
        auto size = number<uint64_t>();
        if (tensor_bytes(tensor.datatype, tensor.shape) != size) {
            throw FrameError("the size of a tensor is not that of its type and shape");
        }
        tensor.buffers.push_back(bytes(size));
        return tensor;
    }

    size_t left() const { return rest_.size(); }

    void end() const {
        if (left() > 0) throw FrameError("a frame is too long for its kind");
    }

private:
    std::string_view rest_;
};

}  // namespace

std::optional<uint64_t> tensor_bytes(uint8_t datatype, const std::vector<int64_t>& shape) {
    uint64_t bytes;
    switch (datatype) {
        case TRITONSERVER_TYPE_BOOL:
        case TRITONSERVER_TYPE_UINT8:
        case TRITONSERVER_TYPE_INT8:
            bytes = 1;
            break;
        case TRITONSERVER_TYPE_UINT16:
        case TRITONSERVER_TYPE_INT16:
        case TRITONSERVER_TYPE_FP16:
            bytes = 2;
            break;
        case TRITONSERVER_TYPE_UINT32:
        case TRITONSERVER_TYPE_INT32:
        case TRITONSERVER_TYPE_FP32:
            bytes = 4;
            break;
        case TRITONSERVER_TYPE_UINT64:
        case TRITONSERVER_TYPE_INT64:
        case TRITONSERVER_TYPE_FP64:
            bytes = 8;
            break;
        default:
            return std::nullopt;
    }
    // NumPy, in which the engine holds the tensor, refuses some shapes of empty tensors. It counts a
    // dimension of 0 as 1.
    uint64_t counted = bytes;
    for (int64_t dimension : shape) {
        uint64_t factor = dimension == 0 ? 1 : static_cast<uint64_t>(dimension);
        if (dimension < 0 || __builtin_mul_overflow(counted, factor, &counted)) return std::nullopt;
        bytes *= static_cast<uint64_t>(dimension);
    }
    if (counted > LARGEST_FRAME) return std::nullopt;
    return bytes;
}

uint64_t request_length(const Request& request) {
    uint64_t length = 1 + 8 + 1 + 1 + 4 + request.parameters.size() + 1;
    length += request.sequence.text ? 2 + request.sequence.text->size() : 8;
    for (const Tensor& input : request.inputs) {
        length += 1 + input.name.size() + 1 + 1 + 8 * input.shape.size() + 8 + buffer_bytes(input);
    }
    return length;
}

std::string request_frame(const Request& request) {
    std::string frame;
    uint64_t length = request_length(request);
    frame.reserve(4 + length);
    append<uint32_t>(frame, length);
    append<uint8_t>(frame, REQUEST);
    append<uint64_t>(frame, request.slot);
    append<uint8_t>(frame, request.flags);
    append<uint8_t>(frame, request.sequence.text.has_value());
    if (request.sequence.text) {
        append<uint16_t>(frame, request.sequence.text->size());
        frame += *request.sequence.text;
    } else {
        append<uint64_t>(frame, request.sequence.number);
    }
    append<uint32_t>(frame, request.parameters.size());
    frame += request.parameters;
    append<uint8_t>(frame, request.inputs.size());
    for (const Tensor& input : request.inputs) {
        append<uint8_t>(frame, input.name.size());
        frame += input.name;
        append<uint8_t>(frame, input.datatype);
        append<uint8_t>(frame, input.shape.size());
        for (int64_t dimension : input.shape) append<int64_t>(frame, dimension);
        append<uint64_t>(frame, buffer_bytes(input));
        for (std::string_view buffer : input.buffers) frame += buffer;
    }
    return frame;
}

std::string cancelled_frame(uint64_t slot) {
    std::string frame;
    append<uint32_t>(frame, 1 + sizeof slot);
    append<uint8_t>(frame, CANCELLED);
    append<uint64_t>(frame, slot);
    return frame;
}

EngineFrame read_engine_frame(std::string_view frame) {
    Reader reader(frame);
    switch (auto kind = reader.number<uint8_t>()) {
        case READY: {
            Ready ready{reader.number<uint32_t>()};
            reader.end();
            return ready;
        }
        case AUDIO: {
            Audio audio{reader.number<uint64_t>(), {}};
            auto count = reader.number<uint8_t>();
            for (int index = 0; index < count; index++) audio.outputs.push_back(reader.tensor());
            reader.end();
            return audio;
        }
        case FINISHED: {
            Finished finished{reader.number<uint64_t>()};
            reader.end();
            return finished;
        }
        case FAILED: {
            Failed failed;
            failed.slot = reader.number<uint64_t>();
            failed.status = reader.number<uint8_t>();
            if (failed.status > TRITONSERVER_ERROR_UNAVAILABLE) {
                throw FrameError("status " + std::to_string(failed.status) + " is not known");
            }
            failed.text = reader.text(reader.left());
            return failed;
        }
        default:
            throw FrameError("kind " + std::to_string(kind) + " of a frame is not known");
    }
}

char* ReceivedBytes::room(size_t* bytes) {
    if (begin_ == end_) {
        begin_ = end_ = 0;
        if (storage_.size() > LARGEST_IDLE_STORAGE) std::vector<char>().swap(storage_);
    }
    if (storage_.size() - end_ < LEAST_ROOM && begin_ > 0) {
        std::memmove(storage_.data(), storage_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
    }
    // The storage grows with the bytes that have come, not with the length that a frame claims.
    if (storage_.size() - end_ < LEAST_ROOM) storage_.resize(2 * storage_.size() + 2 * LEAST_ROOM);
    *bytes = storage_.size() - end_;
    return storage_.data() + end_;
}

void ReceivedBytes::received(size_t bytes) {
    end_ += bytes;
}

std::optional<std::string_view> ReceivedBytes::next_frame() {
    uint32_t length;
    if (end_ - begin_ < sizeof length) return std::nullopt;
    std::memcpy(&length, storage_.data() + begin_, sizeof length);
    if (length == 0 || length > LARGEST_FRAME) {
        throw FrameError("a frame of " + std::to_string(length) + " bytes is not allowed");
    }
    if (end_ - begin_ < sizeof length + length) return std::nullopt;
    std::string_view frame(storage_.data() + begin_ + sizeof length, length);
    begin_ += sizeof length + length;
    return frame;
}

}  // namespace token2wav
