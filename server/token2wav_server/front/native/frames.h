// The protocol between the front and the engine: writes the frames that the front sends, and reads
// those that the engine sends.
//
// All numbers are little-endian. A frame is a u32 with the number of bytes that follow, a u8 with its
// kind, and the payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace token2wav {

constexpr uint32_t PROTOCOL_VERSION = 1;
constexpr uint64_t LARGEST_FRAME = 64 << 20;  // bytes after the length field

// A frame of the engine that cannot be read. It ends the connection.
class FrameError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A tensor. It refers to data that others own.
struct Tensor {
    std::string_view name;
    uint8_t datatype;  // TRITONSERVER_DataType
    std::vector<int64_t> shape;
    std::vector<std::string_view> buffers;  // the data, in one or more pieces
};

// Number of bytes of a tensor, or nothing if the type has no fixed size, a dimension is negative, or
// the tensor would be larger than a frame if its dimensions of 0 were 1.
std::optional<uint64_t> tensor_bytes(uint8_t datatype, const std::vector<int64_t>& shape);

// Id of a sequence: a number, or a text.
struct SequenceId {
    std::optional<std::string> text;
    uint64_t number = 0;
};

struct Request {
    uint64_t slot;
    uint8_t flags;  // 1: sequence start, 2: sequence end
    SequenceId sequence;
    std::string parameters;  // JSON, or empty
    std::vector<Tensor> inputs;
};

// Number of bytes after the length field of the request's frame.
uint64_t request_length(const Request& request);

// Returns the frame of a request. Names have at most 255 bytes, ids 65,535; there are at most 255
// inputs, with at most 255 dimensions; and the length is at most LARGEST_FRAME.
std::string request_frame(const Request& request);

std::string cancelled_frame(uint64_t slot);

struct Ready {
    uint32_t version;
};
struct Audio {
    uint64_t slot;
    std::vector<Tensor> outputs;  // one buffer each
};
struct Finished {
    uint64_t slot;
};
struct Failed {
    uint64_t slot;
    uint8_t status;  // TRITONSERVER_Error_Code, at most TRITONSERVER_ERROR_UNAVAILABLE
    std::string text;
};
using EngineFrame = std::variant<Ready, Audio, Finished, Failed>;

// Reads a frame of the engine, without its length field. The tensors refer to the frame.
//
// Throws FrameError if the frame is not one of the protocol.
EngineFrame read_engine_frame(std::string_view frame);

// Bytes that were received, and are divided into frames.
class ReceivedBytes {
public:
    // Returns room for further bytes, at least 64 KiB. Earlier frames are no longer valid.
    char* room(size_t* bytes);

    // Tells how many bytes have been written into the room.
    void received(size_t bytes);

    // Returns the next complete frame without its length field, or nothing if one is not there yet.
    //
    // Throws FrameError if the length is 0 or above LARGEST_FRAME.
    std::optional<std::string_view> next_frame();

private:
    std::vector<char> storage_;
    size_t begin_ = 0;  // of the bytes that have not been read
    size_t end_ = 0;
};

}  // namespace token2wav
