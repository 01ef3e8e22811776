// Reading a panel in bf12 (see packed_matrix.h).
#pragma once

#include "fetch.h"
#include "isa.h"
#include "packed_matrix.h"

namespace kvrelay {
namespace {

// From its beginning to its end, in bfloat16 as that is packed: a line is 16 pairs, a group 16 lines.
template <class Isa>
class Bf12Panel {
  public:
    using U = typename Isa::U;

    static constexpr int parts = kPanel / Isa::width;
    static constexpr int kLineBytes = kPanel * 4, kLines = kGroup / 2, kGroupBytes = kLines * kLineBytes;
    static constexpr int kPieceLines = 4, kPieceBytes = kPieceLines * kLineBytes * 3 / 4;

    static constexpr int kAhead = 2048;  // bytes by which a piece is fetched before its use

    Bf12Panel() = default;
    Bf12Panel(const PackedMatrix& matrix, int panel)
        : at_(matrix.panel(panel)),
          high_(load<U>(matrix.high)),
          exception_(matrix.exceptions + matrix.first_exception[panel]),
          last_(matrix.exceptions + matrix.first_exception[panel + 1]) {}

    // Whether the group that comes next has exceptions.
    bool exceptional() const { return exception_ < last_ && exception_->at < group_ + kGroup * kPanel; }

    // The next four lines, of a group without exceptions.
    inline __attribute__((always_inline)) void next_lines(U (&lines)[kPieceLines][parts]) {
        expand(lines);
        group_ += kPieceLines * kPanel * 2;
    }

    // The next group to `to`.
    inline __attribute__((always_inline)) void next_group(char* to) {
        for (int line = 0; line < kLines; line += kPieceLines) {
            U lines[kPieceLines][parts];
            expand(lines);
#pragma GCC unroll 4
            for (int i = 0; i < kPieceLines; ++i) {
#pragma GCC unroll 4
                for (int part = 0; part < parts; ++part) {
                    store(to + (line + i) * kLineBytes + part * Isa::width * 4, lines[i][part]);
                }
            }
        }
        for (; exceptional(); ++exception_) std::memcpy(to + (exception_->at - group_) * 2, &exception_->value, 2);
        group_ += kGroup * kPanel;
    }

  private:
    inline __attribute__((always_inline)) void expand(U (&lines)[kPieceLines][parts]) {
        for (int i = 0; i < kPieceBytes; i += 64) fetch(at_ + kAhead + i, kLargeFirstLevel);
#pragma GCC unroll 4
        for (int part = 0; part < parts; ++part) {
            const char* from = at_ + part * Isa::width * 4;
            const U codes = load<U>(from + 2 * kLineBytes);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const U bytes = load<U>(from + half * kLineBytes), code = half ? codes >> 4 : codes;
                const U high = Isa::look_up(high_, code & 0x0f0f0f0fu) | (bytes & 0x80808080u);
                const U low = (code << 7 & 0x80808080u) | (bytes & 0x7f7f7f7fu);
                Isa::interleave_bytes(low, high, lines[2 * half][part], lines[2 * half + 1][part]);
            }
        }
        at_ += kPieceBytes;
    }

    const char* at_ = nullptr;
    U high_{};
    uint32_t group_ = 0;  // values before what comes next
    const Exception* exception_ = nullptr;
    const Exception* last_ = nullptr;
};

// Calls `one(line, weight)` for each line of the next group of some panels. The groups go to `to`, but with
// `in_registers` only those with exceptions.
template <class Isa, int Panels, class Do>
inline __attribute__((always_inline)) void each_line(
    Bf12Panel<Isa> (&from)[Panels], bool in_registers, char* const* to, Do one
) {
    using Source = Bf12Panel<Isa>;
    using U = typename Isa::U;
    U weight[Panels][Source::parts];
    for (int p = 0; p < Panels; ++p) in_registers = in_registers && !from[p].exceptional();
    if (in_registers) {
        for (int first = 0; first < Source::kLines; first += Source::kPieceLines) {
            U lines[Panels][Source::kPieceLines][Source::parts];
#pragma GCC unroll 2
            for (int p = 0; p < Panels; ++p) from[p].next_lines(lines[p]);
#pragma GCC unroll 4
            for (int line = 0; line < Source::kPieceLines; ++line) {
#pragma GCC unroll 2
                for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
                    for (int i = 0; i < Source::parts; ++i) weight[p][i] = lines[p][line][i];
                }
                one(first + line, weight);
            }
        }
        return;
    }
    for (int p = 0; p < Panels; ++p) from[p].next_group(to[p]);
    for (int line = 0; line < Source::kLines; ++line) {
#pragma GCC unroll 2
        for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
            for (int i = 0; i < Source::parts; ++i) {
                weight[p][i] = load<U>(to[p] + line * Source::kLineBytes + i * Isa::width * 4);
            }
        }
        one(line, weight);
    }
}

}  // namespace
}  // namespace kvrelay
