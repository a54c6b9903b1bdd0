// Checks and writes text that comes from clients.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace token2wav {

// True for text that Python's decoder accepts: no overlong forms, no surrogates, at most U+10FFFF.
bool is_utf8(std::string_view text);

// Writes one JSON object, member by member. Any bytes are accepted: a byte that is not part of valid
// UTF-8 becomes U+FFFD, so the object is valid whatever a client sends.
class JsonObject {
public:
    void add_text(std::string_view name, std::string_view value);
    void add_integer(std::string_view name, int64_t value);
    void add_boolean(std::string_view name, bool value);
    // Written as Python's json writes and reads floats: `1.0`, `NaN`, `Infinity`.
    void add_double(std::string_view name, double value);

    // The object, or an empty text for an object without members.
    std::string text() const;

private:
    void add_name(std::string_view name);

    std::string members_;
};

}  // namespace token2wav
