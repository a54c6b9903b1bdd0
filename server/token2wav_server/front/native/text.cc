#include "text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace token2wav {
namespace {

unsigned char byte_at(std::string_view text, size_t index) {
    return static_cast<unsigned char>(text[index]);
}

// Number of bytes of the character that begins at an index, or 0 if none does.
size_t character_length(std::string_view text, size_t index) {
    unsigned char first = byte_at(text, index);
    if (first < 0x80) return 1;
    size_t length = first >= 0xC2 && first <= 0xDF ? 2
                    : first >= 0xE0 && first <= 0xEF ? 3
                    : first >= 0xF0 && first <= 0xF4 ? 4
                                                     : 0;
    if (length == 0 || text.size() - index < length) return 0;
    for (size_t i = 1; i < length; i++) {
        if ((byte_at(text, index + i) & 0xC0) != 0x80) return 0;
    }
    unsigned char second = byte_at(text, index + 1);
    bool overlong = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
    bool surrogate = first == 0xED && second > 0x9F;
    bool too_large = first == 0xF4 && second > 0x8F;
    return overlong || surrogate || too_large ? 0 : length;
}

void append_quoted(std::string& out, std::string_view text) {
    out += '"';
    for (size_t index = 0; index < text.size();) {
        size_t length = character_length(text, index);
        unsigned char first = byte_at(text, index);
        if (length == 0) {
            out += "\\ufffd";
            length = 1;
        } else if (first < 0x20 || first == 0x7F) {
            char escape[7];
            std::snprintf(escape, sizeof escape, "\\u%04x", first);
            out += escape;
        } else if (first == '"' || first == '\\') {
            out += '\\';
            out += static_cast<char>(first);
        } else {
            out += text.substr(index, length);
        }
        index += length;
    }
    out += '"';
}

}  // namespace

bool is_utf8(std::string_view text) {
    for (size_t index = 0; index < text.size();) {
        size_t length = character_length(text, index);
        if (length == 0) return false;
        index += length;
    }
    return true;
}

void JsonObject::add_name(std::string_view name) {
    if (!members_.empty()) members_ += ',';
    append_quoted(members_, name);
    members_ += ':';
}

void JsonObject::add_text(std::string_view name, std::string_view value) {
    add_name(name);
    append_quoted(members_, value);
}

void JsonObject::add_integer(std::string_view name, int64_t value) {
    add_name(name);
    members_ += std::to_string(value);
}

void JsonObject::add_boolean(std::string_view name, bool value) {
    add_name(name);
    members_ += value ? "true" : "false";
}

void JsonObject::add_double(std::string_view name, double value) {
    add_name(name);
    if (std::isnan(value)) {
        members_ += "NaN";
        return;
    }
    if (std::isinf(value)) {
        members_ += value > 0 ? "Infinity" : "-Infinity";
        return;
    }
    char buffer[40];
    std::snprintf(buffer, sizeof buffer, "%.17g", value);
    std::string digits = buffer;
    // The locale of the process may have another decimal separator.
    std::replace(digits.begin(), digits.end(), ',', '.');
    // Without it, Python would read an integer.
    if (digits.find_first_of(".e") == std::string::npos) digits += ".0";
    members_ += digits;
}

std::string JsonObject::text() const {
    return members_.empty() ? "" : "{" + members_ + "}";
}

}  // namespace token2wav
