// Rules of instructions that compute each lane by itself: PTX ISA 9.7.1 to 9.7.9.
#pragma once

#include <bit>
#include <cmath>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "half.h"
#include "movement.h"

namespace ptx {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

template <class F, class D, class... A>
struct LaneByLane {
  static_assert(std::is_empty_v<F>);
  static bool run(Warp& warp, const Instruction& x, Lanes lanes) {
    return run(warp, x, lanes, std::index_sequence_for<A...>());
  }
  template <size_t... I>
  static bool run(Warp& warp, const Instruction& x, Lanes lanes, std::index_sequence<I...>) {
    const Lanes defined = (warp.defined(x.operands[I + 1], lanes) & ...);
    const std::tuple<const A*...> values{warp.at(x.operands[I + 1].at).template lanes<const A>()...};
    D result[kLanes];
    for (int i = 0; i < kLanes; i++) result[i] = F{}(lane_of(std::get<I>(values), i)...);
    warp.write(x.operands[0], lanes, result, defined);
    return true;
  }
};

template <class T>
std::string bits_of() {
  return std::is_same_v<T, bool> ? "1" : std::to_string(8 * sizeof(T));
}

// The same rule for instructions of these names, which spaces separate.
template <class D, class... A, class F>
void add(Rules& rules, const std::string& names, F) {
  const std::string operands = "d" + bits_of<D>() + ((" s" + bits_of<A>()) + ...);
  for (size_t begin = 0, end; begin < names.size(); begin = end + 1) {
    end = std::min(names.find(' ', begin), names.size());
    rules[names.substr(begin, end - begin)] = {operands, LaneByLane<F, D, A...>::run};
  }
}

template <class T>
std::string type_name() {
  return (std::is_floating_point_v<T> ? "f" : std::is_signed_v<T> ? "s" : "u") + bits_of<T>();
}

inline float flush(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

// PTX ISA 9.7.3.12 max: of NaN and a number the number, and +0 above -0.
inline float larger(float a, float b) {
  if (a == b) return std::signbit(a) ? b : a;
  return std::isnan(a) || a < b ? (std::isnan(b) ? (std::isnan(a) ? std::bit_cast<float>(0x7fffffffu) : a) : b) : a;
}
inline float smaller(float a, float b) { return std::isnan(a) && std::isnan(b) ? larger(a, b) : -larger(-a, -b); }

// 9.7.9.7 prmt: a source of which no byte is taken may be undefined, as where LLVM permutes one alone.
inline bool permute_bytes(Warp& warp, const Instruction& x, Lanes lanes) {
  const u32* sources[3];
  for (int k = 0; k < 3; k++) sources[k] = warp.at(x.operands[k + 1].at).lanes<const u32>();
  u32 result[kLanes]{};
  Lanes takes[2]{};
  for (int i = 0; i < kLanes; i++) {
    const u64 both = u64(lane_of(sources[1], i)) << 32 | lane_of(sources[0], i);
    for (int k = 0; k < 4; k++) {
      const u32 select = lane_of(sources[2], i) >> 4 * k & 15, byte = u32(both >> 8 * (select & 7)) & 255;
      result[i] |= (select & 8 ? (byte & 128 ? 255u : 0) : byte) << 8 * k;
      takes[select >> 2 & 1] |= Lanes(1) << i;
    }
  }
  Lanes defined = warp.defined(x.operands[3], lanes);
  for (int k = 0; k < 2; k++) defined &= warp.defined(x.operands[k + 1], lanes) | ~takes[k];
  warp.write(x.operands[0], lanes, result, defined);
  return true;
}

template <class T>
void add_integers(Rules& rules) {
  using U = std::make_unsigned_t<T>;
  const std::string t = "." + type_name<T>();
  // 9.7.1 integer arithmetic: it wraps around.
  add<U, U, U>(rules, "add" + t, [](U a, U b) { return U(a + b); });
  add<U, U, U>(rules, "sub" + t, [](U a, U b) { return U(a - b); });
  add<U, U, U>(rules, "mul.lo" + t, [](U a, U b) { return U(u64(a) * u64(b)); });
  add<U, U, U, U>(rules, "mad.lo" + t, [](U a, U b, U c) { return U(u64(a) * u64(b) + c); });
  add<T, T, T>(rules, "min" + t, [](T a, T b) { return std::min(a, b); });
  add<T, T, T>(rules, "max" + t, [](T a, T b) { return std::max(a, b); });
  add<T, T, u32>(rules, "shr" + t, [](T a, u32 b) { return T(b < sizeof(T) * 8 ? a >> b : a < 0 ? T(-1) : T(0)); });
  // Division by zero is undefined in the manual and leaves a result, of no consequence where it is not used.
  add<T, T, T>(rules, "div" + t, [](T a, T b) {
    return b == 0 ? T(-1) : b == T(-1) && std::is_signed_v<T> ? T(0 - U(a)) : T(a / b);
  });
  add<T, T, T>(rules, "rem" + t, [](T a, T b) {
    return b == 0 ? a : b == T(-1) && std::is_signed_v<T> ? T(0) : T(a % b);
  });
  if constexpr (sizeof(T) < 8) {
    using W = std::conditional_t<std::is_signed_v<T>, std::conditional_t<sizeof(T) == 2, s32, s64>,
                                 std::conditional_t<sizeof(T) == 2, u32, u64>>;
    add<W, T, T>(rules, "mul.wide" + t, [](T a, T b) { return W(W(a) * W(b)); });
    add<T, T, T>(rules, "mul.hi" + t, [](T a, T b) { return T(W(a) * W(b) >> sizeof(T) * 8); });
    add<W, T, T, W>(rules, "mad.wide" + t, [](T a, T b, W c) { return W(u64(W(a) * W(b)) + u64(c)); });
  } else {
    using W = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    add<T, T, T>(rules, "mul.hi" + t, [](T a, T b) { return T(W(a) * W(b) >> 64); });
  }
  if constexpr (std::is_signed_v<T>) {
    add<T, T>(rules, "abs" + t, [](T a) { return T(a < 0 ? 0 - U(a) : U(a)); });
    add<T, T>(rules, "neg" + t, [](T a) { return T(0 - U(a)); });
  }
  // 9.7.6.1 setp, which of signed and unsigned integers have other names for the order.
  const bool is_signed = std::is_signed_v<T>;
  add<bool, T, T>(rules, "setp.lt" + t + (is_signed ? "" : " setp.lo" + t), [](T a, T b) { return a < b; });
  add<bool, T, T>(rules, "setp.le" + t + (is_signed ? "" : " setp.ls" + t), [](T a, T b) { return a <= b; });
  add<bool, T, T>(rules, "setp.gt" + t + (is_signed ? "" : " setp.hi" + t), [](T a, T b) { return a > b; });
  add<bool, T, T>(rules, "setp.ge" + t + (is_signed ? "" : " setp.hs" + t), [](T a, T b) { return a >= b; });
  add<bool, T, T>(rules, "setp.eq" + t, [](T a, T b) { return a == b; });
  add<bool, T, T>(rules, "setp.ne" + t, [](T a, T b) { return a != b; });
  add<T, T, T, bool>(rules, "selp" + t, [](T a, T b, bool p) { return p ? a : b; });
  add<T, T>(rules, "mov" + t, [](T a) { return a; });
}

template <class U>
void add_bits(Rules& rules) {
  const std::string t = ".b" + bits_of<U>();
  // 9.7.8 logic and shift: what is shifted by more than all bits is gone.
  add<U, U, U>(rules, "and" + t, [](U a, U b) { return U(a & b); });
  add<U, U, U>(rules, "or" + t, [](U a, U b) { return U(a | b); });
  add<U, U, U>(rules, "xor" + t, [](U a, U b) { return U(a ^ b); });
  add<U, U>(rules, "not" + t, [](U a) { return U(~a); });
  add<U, U, u32>(rules, "shl" + t, [](U a, u32 b) { return U(b < sizeof(U) * 8 ? u64(a) << b : 0); });
  add<U, U, u32>(rules, "shr" + t, [](U a, u32 b) { return U(b < sizeof(U) * 8 ? a >> b : 0); });
  add<bool, U, U>(rules, "setp.eq" + t, [](U a, U b) { return a == b; });
  add<bool, U, U>(rules, "setp.ne" + t, [](U a, U b) { return a != b; });
  add<U, U, U, bool>(rules, "selp" + t, [](U a, U b, bool p) { return p ? a : b; });
  add<U, U>(rules, "mov" + t, [](U a) { return a; });
}

// 9.7.9.21 cvt between integers: one that is too large loses its upper bits, and registers may be wider than the types.
// a, b: bytes of the type that is read and written, negative where it has a sign.
inline uint64_t extended(uint64_t x, int bytes) {
  const int unused = 64 - 8 * std::abs(bytes);
  return bytes < 0 ? uint64_t(int64_t(x << unused) >> unused) : x << unused >> unused;
}
inline bool convert(Warp& warp, const Instruction& x, Lanes lanes) {
  const Lanes defined = warp.defined(x.operands[1], lanes);
  uint64_t values[kLanes]{};
  for (int i = 0; i < kLanes; i++) values[i] = extended(extended(warp.value(x.operands[1], i), x.rule->a), x.rule->b);
  write_integers(warp, x.operands[0], lanes, values, defined);
  return true;
}
inline void add_conversions(Rules& rules) {
  for (const std::string to : {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"}) {
    for (const std::string from : {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"}) {
      const auto bits = [](const std::string& type) { return std::atoi(&type[1]); };
      const auto bytes = [&](const std::string& type) { return (type[0] == 's' ? -1 : 1) * bits(type) / 8; };
      const auto form = [&](const std::string& type) { return std::to_string(std::max(bits(type), 16)) + "+"; };
      rules["cvt." + to + "." + from] = {"d" + form(to) + " s" + form(from), convert, bytes(from), bytes(to)};
    }
  }
}

template <class D>
void add_float_conversions(Rules& rules) {
  add<float, D>(rules, "cvt.rn.f32." + type_name<D>(), [](D a) { return float(a); });
  const auto to = [](float x) {  // saturates, and NaN is 0
    constexpr double least = double(std::numeric_limits<D>::min()), most = double(std::numeric_limits<D>::max());
    if (std::isnan(x)) return D(0);
    return x <= least ? std::numeric_limits<D>::min() : x >= most ? std::numeric_limits<D>::max() : D(x);
  };
  add<D, float>(rules, "cvt.rzi." + type_name<D>() + ".f32", [](float a) { return decltype(to){}(std::trunc(a)); });
  add<D, float>(rules, "cvt.rni." + type_name<D>() + ".f32", [](float a) { return decltype(to){}(std::nearbyint(a)); });
  add<D, float>(rules, "cvt.rmi." + type_name<D>() + ".f32", [](float a) { return decltype(to){}(std::floor(a)); });
}

template <class T>
void add_floats(Rules& rules) {
  const std::string t = "." + type_name<T>();
  // 9.7.3 floating point, rounded to the nearest.
  add<T, T, T>(rules, "add" + t + " add.rn" + t, [](T a, T b) { return a + b; });
  add<T, T, T>(rules, "sub" + t + " sub.rn" + t, [](T a, T b) { return a - b; });
  add<T, T, T>(rules, "mul" + t + " mul.rn" + t, [](T a, T b) { return a * b; });
  add<T, T, T>(rules, "div.rn" + t, [](T a, T b) { return a / b; });
  add<T, T>(rules, "rcp.rn" + t, [](T a) { return 1 / a; });
  add<T, T, T, T>(rules, "fma.rn" + t, [](T a, T b, T c) { return std::fma(a, b, c); });
  add<T, T>(rules, "abs" + t, [](T a) { return std::fabs(a); });
  add<T, T>(rules, "neg" + t, [](T a) { return -a; });
  // 9.7.3.2 copysign: the sign of the first, the value of the second.
  add<T, T, T>(rules, "copysign" + t, [](T a, T b) { return std::copysign(b, a); });
  add<T, T, T, bool>(rules, "selp" + t, [](T a, T b, bool p) { return p ? a : b; });
  add<T, T>(rules, "mov" + t, [](T a) { return a; });
  add<bool, T, T>(rules, "setp.lt" + t, [](T a, T b) { return a < b; });
  add<bool, T, T>(rules, "setp.le" + t, [](T a, T b) { return a <= b; });
  add<bool, T, T>(rules, "setp.gt" + t, [](T a, T b) { return a > b; });
  add<bool, T, T>(rules, "setp.ge" + t, [](T a, T b) { return a >= b; });
  add<bool, T, T>(rules, "setp.eq" + t, [](T a, T b) { return a == b; });
  add<bool, T, T>(rules, "setp.ne" + t, [](T a, T b) { return a < b || a > b; });
  add<bool, T, T>(rules, "setp.ltu" + t, [](T a, T b) { return !(a >= b); });
  add<bool, T, T>(rules, "setp.leu" + t, [](T a, T b) { return !(a > b); });
  add<bool, T, T>(rules, "setp.gtu" + t, [](T a, T b) { return !(a <= b); });
  add<bool, T, T>(rules, "setp.geu" + t, [](T a, T b) { return !(a < b); });
  add<bool, T, T>(rules, "setp.equ" + t, [](T a, T b) { return !(a < b || a > b); });
  add<bool, T, T>(rules, "setp.neu" + t, [](T a, T b) { return a != b; });
  add<bool, T, T>(rules, "setp.num" + t, [](T a, T b) { return !std::isnan(a) && !std::isnan(b); });
  add<bool, T, T>(rules, "setp.nan" + t, [](T a, T b) { return std::isnan(a) || std::isnan(b); });
}

inline void add_arithmetic(Rules& rules) {
  add_integers<s16>(rules), add_integers<s32>(rules), add_integers<s64>(rules);
  add_integers<u16>(rules), add_integers<u32>(rules), add_integers<u64>(rules);
  add_bits<u16>(rules), add_bits<u32>(rules), add_bits<u64>(rules);
  add_conversions(rules);
  add_float_conversions<s16>(rules), add_float_conversions<s32>(rules), add_float_conversions<s64>(rules);
  add_float_conversions<u16>(rules), add_float_conversions<u32>(rules), add_float_conversions<u64>(rules);

  add<bool, bool, bool>(rules, "and.pred", [](bool a, bool b) { return a && b; });
  add<bool, bool, bool>(rules, "or.pred", [](bool a, bool b) { return a || b; });
  add<bool, bool, bool>(rules, "xor.pred", [](bool a, bool b) { return a != b; });
  add<bool, bool>(rules, "not.pred", [](bool a) { return !a; });
  add<bool, bool>(rules, "mov.pred", [](bool a) { return a; });

  add_floats<float>(rules), add_floats<double>(rules);
  // 9.7.3 floating point. What is "approx" or "full" is computed to the nearest here.
  add<float, float, float>(rules, "div.full.f32", [](float a, float b) { return a / b; });
  // 9.7.3.8 div.approx is a * (1 / b), whose second factor is 0 above 2^126.
  add<float, float, float>(rules, "div.approx.f32", [](float a, float b) {
    return a * (std::fabs(b) > 0x1p126f ? std::copysign(0.f, b) : 1 / b);
  });
  add<float, float, float, float>(
      rules, "fma.rn.ftz.f32", [](float a, float b, float c) { return flush(std::fma(flush(a), flush(b), flush(c))); });
  add<float, float, float>(rules, "max.f32", [](float a, float b) { return larger(a, b); });
  add<float, float, float>(rules, "min.f32", [](float a, float b) { return smaller(a, b); });
  add<float, float, float>(rules, "max.NaN.f32", [](float a, float b) {
    return std::isunordered(a, b) ? std::numeric_limits<float>::quiet_NaN() : larger(a, b);
  });
  add<float, float, float>(rules, "min.NaN.f32", [](float a, float b) {
    return std::isunordered(a, b) ? std::numeric_limits<float>::quiet_NaN() : smaller(a, b);
  });
  add<float, float>(rules, "ex2.approx.f32", [](float a) { return std::exp2(a); });
  add<float, float>(rules, "ex2.approx.ftz.f32", [](float a) { return flush(std::exp2(flush(a))); });
  add<float, float>(rules, "lg2.approx.f32", [](float a) { return std::log2(a); });
  add<float, float>(rules, "rcp.approx.ftz.f32", [](float a) { return flush(1 / flush(a)); });
  // 9.7.3.14 rcp.approx.ftz.f64 reads and writes the upper 32 bits alone. It is "gross": what it is used for must not
  // depend on its last bits.
  add<double, double>(rules, "rcp.approx.ftz.f64", [](double a) {
    const auto upper = [](double x) {
      const double y = std::bit_cast<double>(std::bit_cast<u64>(x) >> 32 << 32);
      return std::fabs(y) < std::numeric_limits<double>::min() ? std::copysign(0.0, y) : y;
    };
    return upper(1 / upper(a));
  });

  // 9.7.9.21 cvt of floats.
  add<double, float>(rules, "cvt.f64.f32", [](float a) { return double(a); });
  add<float, double>(rules, "cvt.rn.f32.f64", [](double a) { return float(a); });
  add<float, u16>(rules, "cvt.f32.f16", [](u16 a) { return float_of_f16(a); });
  add<float, u16>(rules, "cvt.f32.bf16", [](u16 a) { return float_of_bf16(a); });
  add<u16, float>(rules, "cvt.rn.f16.f32", [](float a) { return f16_of(a); });
  add<u16, float>(rules, "cvt.rn.bf16.f32", [](float a) { return bf16_of(a); });
  add<u32, float, float>(rules, "cvt.rn.f16x2.f32", [](float a, float b) { return u32(f16_of(a)) << 16 | f16_of(b); });
  add<u32, float, float>(rules, "cvt.rn.bf16x2.f32",
                         [](float a, float b) { return u32(bf16_of(a)) << 16 | bf16_of(b); });
  // To the nearest number of 10 bits after the point, of two that are as near to the one further from 0.
  add<u32, float>(rules, "cvt.rna.tf32.f32", [](float a) {
    const u32 bits = std::bit_cast<u32>(a);
    return std::isfinite(a) ? (bits + 0x1000) & ~0x1fffu : bits;
  });
  add<u32, u16>(rules, "cvt.rn.f16x2.e4m3x2", [](u16 a) {
    const auto converted = [](u32 x) {  // with one bit more in the exponent it is a number of f16, 2^8 times as small
      const u16 size = (x & 0x7f) == 0x7f ? kNaN16 : f16_of(256 * float_of_f16(u16((x & 0x7f) << 7)));
      return size | (x & 0x80) << 8;
    };
    return converted(a >> 8) << 16 | converted(a & 0xff);
  });
  add<float, float>(rules, "cvt.rmi.f32.f32", [](float a) { return std::floor(a); });
  add<float, float>(rules, "cvt.rzi.f32.f32", [](float a) { return std::trunc(a); });
  add<float, float>(rules, "cvt.rni.f32.f32", [](float a) { return std::nearbyint(a); });

  add<s32, s32, s32>(rules, "min.relu.s32", [](s32 a, s32 b) { return std::max(std::min(a, b), 0); });
  add<s32, s32, s32>(rules, "max.relu.s32", [](s32 a, s32 b) { return std::max(std::max(a, b), 0); });
  // 9.7.1.17 bfind: by how much the highest bit that is set must be shifted to the left; 9.7.1.19 brev.
  add<u32, u32>(rules, "bfind.shiftamt.u32", [](u32 a) { return a ? u32(std::countl_zero(a)) : ~0u; });
  add<u32, u32>(rules, "brev.b32", [](u32 a) {
    u32 result = 0;
    for (int i = 0; i < 32; i++) result |= (a >> i & 1) << (31 - i);
    return result;
  });
  // 9.7.1.20 bfe, 9.7.1.21 bfi.
  add<u32, u32, u32, u32>(rules, "bfe.u32", [](u32 a, u32 b, u32 c) {
    b &= 255, c &= 255;
    return b > 31 ? 0 : u32(a >> b & ((1ull << std::min(c, 32u)) - 1));
  });
  add<u64, u64, u32, u32>(rules, "bfe.u64", [](u64 a, u32 b, u32 c) {
    b &= 255, c &= 255;
    return b > 63 ? 0 : a >> b & (c > 63 ? ~0ull : (1ull << c) - 1);
  });
  add<s32, s32, u32, u32>(rules, "bfe.s32", [](s32 a, u32 b, u32 c) {
    b &= 255, c &= 255;
    if (c == 0) return 0;
    const u32 top = std::max(std::min(b + c - 1, 31u), b);  // of the field, whose sign is extended
    return b > 31 ? a >> 31 : s32(s64(u64(s64(a)) << (63 - top)) >> (63 - top + b));
  });
  add<u32, u32, u32, u32, u32>(rules, "bfi.b32", [](u32 a, u32 b, u32 c, u32 d) {
    c &= 255, d &= 255;
    const u64 field = c > 31 ? 0 : ((1ull << std::min(d, 32u)) - 1) << c;
    return u32((b & ~field) | (c > 31 ? 0 : (u64(a) << c & field)));
  });
  rules["prmt.b32"] = {"d32 s32 s32 s32", permute_bytes};
  // 9.7.9.20 cvta: generic addresses of global memory are those that it has.
  add<u64, u64>(rules, "cvta.to.global.u64 cvta.global.u64", [](u64 a) { return a; });
  add<u64, u64>(rules, "cvta.param.u64", [](u64 a) { return a | kParameterSpace; });
}

// 9.7.9.3 mov: vectors of registers into one, and back.
template <class Part, class Whole>
bool pack(Warp& warp, const Instruction& x, Lanes lanes) {
  Whole result[kLanes]{};
  Lanes defined = lanes;
  for (size_t k = 0; k + 1 < x.operands.size(); k++) {
    defined &= warp.defined(x.operands[k + 1], lanes);
    const Part* part = warp.at(x.operands[k + 1].at).lanes<const Part>();
    for (int i = 0; i < kLanes; i++) result[i] |= Whole(part[i]) << 8 * sizeof(Part) * k;
  }
  warp.write(x.operands[0], lanes, result, defined);
  return true;
}
template <class Part, class Whole>
bool unpack(Warp& warp, const Instruction& x, Lanes lanes) {
  const Lanes defined = warp.defined(x.operands.back(), lanes);
  const Whole* whole = warp.at(x.operands.back().at).lanes<const Whole>();
  for (size_t k = 0; k + 1 < x.operands.size(); k++) {
    Part part[kLanes];
    for (int i = 0; i < kLanes; i++) part[i] = Part(whole[i] >> 8 * sizeof(Part) * k);
    warp.write(x.operands[k], lanes, part, defined);
  }
  return true;
}

inline void add_vectors(Rules& rules) {
  rules["mov.b32 pack2"] = {"d32 2s16", pack<u16, u32>}, rules["mov.b32 unpack2"] = {"2d16 s32", unpack<u16, u32>};
  rules["mov.b64 pack2"] = {"d64 2s32", pack<u32, u64>}, rules["mov.b64 unpack2"] = {"2d32 s64", unpack<u32, u64>};
  rules["mov.b64 pack4"] = {"d64 4s16", pack<u16, u64>}, rules["mov.b64 unpack4"] = {"4d16 s64", unpack<u16, u64>};
}

}  // namespace ptx
