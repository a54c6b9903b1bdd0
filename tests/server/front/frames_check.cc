// Runs cases through the frames and texts of the native front, for test_native_frames.py.
//
// Reads cases: a letter, a u32 length, and that many bytes. Writes a line for each.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "frames.h"
#include "text.h"

using namespace token2wav;

namespace {

// Reads a stream that comes in pieces of changing sizes. Returns the number of its frames, and the
// problem that ended it.
std::string read_stream(std::string_view stream) {
    ReceivedBytes bytes;
    int frames = 0;
    try {
        for (size_t piece = 1; !stream.empty(); piece = piece * 7 % 4099) {
            size_t room;
            char* target = bytes.room(&room);
            size_t count = std::min({piece, room, stream.size()});
            std::memcpy(target, stream.data(), count);
            bytes.received(count);
            stream.remove_prefix(count);
            while (auto frame = bytes.next_frame()) {
                // A copy of the right size, so that the sanitizer sees a read behind it.
                std::vector<char> copy(frame->begin(), frame->end());
                read_engine_frame({copy.data(), copy.size()});
                frames++;
            }
        }
    } catch (const FrameError& error) {
        return std::to_string(frames) + " " + error.what();
    }
    return std::to_string(frames);
}

std::string as_json(std::string_view text) {
    JsonObject object;
    object.add_text(text, text);
    object.add_text("more", text);
    return object.text();
}

std::string as_json_number(std::string_view bytes) {
    double value;
    std::memcpy(&value, bytes.data(), sizeof value);
    JsonObject object;
    object.add_double("value", value);
    return object.text();
}

// A request whose input comes in three buffers, in hexadecimal digits.
std::string request_in_pieces(std::string_view data) {
    size_t third = data.size() / 3;
    Tensor input{"voice_id", 2, {static_cast<int64_t>(data.size())}, {}};
    input.buffers = {data.substr(0, third), data.substr(third, third), data.substr(2 * third)};
    Request request{7, 3, {"name", 0}, "{}", {input}};
    std::string digits;
    for (unsigned char byte : request_frame(request)) {
        char two[3];
        std::snprintf(two, sizeof two, "%02x", byte);
        digits += two;
    }
    return digits;
}

}  // namespace

int main() {
    char letter;
    uint32_t length;
    while (std::fread(&letter, 1, 1, stdin) == 1 && std::fread(&length, 4, 1, stdin) == 1) {
        std::vector<char> buffer(length);
        if (std::fread(buffer.data(), 1, length, stdin) != length) return 1;
        std::string_view bytes(buffer.data(), length);
        std::string line = letter == 's'   ? read_stream(bytes)
                           : letter == 'u' ? std::to_string(is_utf8(bytes))
                           : letter == 'j' ? as_json(bytes)
                           : letter == 'd' ? as_json_number(bytes)
                                           : request_in_pieces(bytes);
        std::puts(line.c_str());
    }
}
