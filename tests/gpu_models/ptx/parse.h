// The text of a PTX module, read strictly: what is not known here or to a rule is an error.
#pragma once

#include <cctype>
#include <cstdlib>
#include <string_view>
#include <tuple>
#include <utility>

#include "machine.h"

namespace ptx {

// What an operand may be, read from a word of `Rule::operands`: "d32" a register of 32 bits that is written, "s32" one
// that is read, or a constant; "s16+" one of 16 bits or more; "d1" a predicate; "4d32" four of them in braces; "a" an
// address in brackets, "4m" a tensor map with four coordinates in brackets, "i" an integer, "l" a label, "t" a table of
// labels, "_" the sink. "d1|d1" may be "d1" alone.
struct Form {
  int count = 0;  // of a vector; 0 for a single one
  char role = 0;
  int bits = 0;
  bool wider = false;

  explicit Form(std::string_view word) {
    while (std::isdigit(word[0])) count = count * 10 + word[0] - '0', word.remove_prefix(1);
    role = word[0];
    for (word.remove_prefix(1); !word.empty() && std::isdigit(word[0]); word.remove_prefix(1))
      bits = bits * 10 + word[0] - '0';
    wider = word == "+";
  }
};

inline std::string_view trimmed(std::string_view x) {
  while (!x.empty() && std::isspace(x.front())) x.remove_prefix(1);
  while (!x.empty() && std::isspace(x.back())) x.remove_suffix(1);
  return x;
}

// The parts between separators that stand in no brackets, braces or parentheses.
inline std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); i++) {
    if (i < text.size() && (text[i] == '{' || text[i] == '[' || text[i] == '(')) depth++;
    if (i < text.size() && (text[i] == '}' || text[i] == ']' || text[i] == ')')) depth--;
    if (i == text.size() || (text[i] == separator && depth == 0)) {
      if (auto part = trimmed(text.substr(begin, i - begin)); !part.empty()) parts.push_back(part);
      begin = i + 1;
    }
  }
  return parts;
}

inline bool starts_with(std::string_view text, std::string_view word) { return text.substr(0, word.size()) == word; }

class Parser {
 public:
  Parser(std::string_view text, const Rules& rules)
      : text_(text), rules_(rules), program_(std::make_unique<Program>()) {}

  // The kernel of that name; of a module with one kernel an empty name will do.
  std::unique_ptr<Program> parse(std::string_view kernel) {
    scopes_.emplace_back();
    while (skip_space(), at_ < text_.size()) module_statement(kernel);
    if (program_->name.empty()) fail("no such kernel");
    std::tie(at_, line_) = body_;
    scopes_.emplace_back();
    while (scopes_.size() > 1) body_statement();
    while (program_->registers.size() % alignof(Register)) program_->registers.push_back(0);
    program_->counts.resize(program_->instructions.size());
    return std::move(program_);
  }
  std::string place() const { return "line " + std::to_string(line_); }

 private:
  // PTX ISA 5.1.6 .param within a body: what a call passes, whose parts, by their offset and bits, are registers.
  struct Argument {
    int bytes;
    std::map<std::pair<int64_t, int>, Operand> parts;
  };
  struct Scope {
    std::map<std::string, Operand, std::less<>> names;
    std::map<std::string, int, std::less<>> labels;
    std::map<std::string, std::vector<std::string>, std::less<>> tables;
    std::vector<std::pair<int, std::string>> branches;  // whose labels are not known yet
    std::map<std::string, std::shared_ptr<Argument>, std::less<>> arguments;
    bool is_function = false;  // which sees nothing of those who call it
  };
  static constexpr const char* kReturn = "}";  // the label of the end of a function
  struct Function {
    std::string result, parameters;
    std::pair<size_t, int> body;  // place and line
  };

  [[noreturn]] static void fail(std::string_view what) { fault("PTX: " + std::string(what)); }

  void skip_space() {
    for (; at_ < text_.size(); at_++) {
      if (text_[at_] == '\n')
        line_++;
      else if (starts_with(text_.substr(at_), "//"))
        at_ = std::min(text_.find('\n', at_), text_.size()) - 1;
      else if (!std::isspace(text_[at_]))
        return;
    }
  }
  // Up to one of these characters, which is passed too; without comments.
  std::string until(const char* ends) {
    std::string result;
    for (skip_space(); at_ < text_.size(); at_++) {
      if (starts_with(text_.substr(at_), "//")) at_ = text_.find('\n', at_);
      if (std::strchr(ends, text_[at_])) {
        line_ += text_[at_++] == '\n';
        return std::string(trimmed(result));
      }
      line_ += text_[at_] == '\n';
      result += text_[at_] == '\n' ? ' ' : text_[at_];
    }
    fail("it ends too early");
  }
  std::string word() {
    skip_space();
    const size_t begin = at_;
    while (at_ < text_.size() && (std::isalnum(text_[at_]) || std::strchr("_$.%:", text_[at_]))) at_++;
    return std::string(text_.substr(begin, at_ - begin));
  }

  // PTX ISA 5.1 state spaces and 11 directives.
  void module_statement(std::string_view kernel) {
    const std::string first = word();
    if (first == ".version" || first == ".target" || first == ".address_size") {
      const std::string given = until("\n");
      if (first == ".target") program_->arch = std::atoi(given.substr(std::min(given.size(), 3zu)).c_str());
    } else if (first == ".extern" || first == ".global" || first == ".shared") {
      variable(first + " " + until(";"));
    } else if (first == ".visible" || first == ".entry") {
      if (first == ".visible" && word() != ".entry") fail("a function that is visible");
      const std::string name = until("(");
      const std::string parameters = until(")");
      const std::string limits = until("{");
      const bool wanted = kernel.empty() ? program_->name.empty() : name == kernel;
      if (!wanted && kernel.empty()) fail("there are several kernels");
      body_ = wanted ? std::pair{at_, line_} : body_;
      skip_body();
      if (!wanted) return;
      program_->name = name;
      for (auto x : split(parameters, ',')) parameter(x);
      limit(limits);
    } else if (first == ".func") {
      function(until("{;"));
    } else {
      fail("unknown directive " + first);
    }
  }
  void skip_body() {
    for (int depth = 1; depth > 0; at_++) {
      if (at_ >= text_.size()) fail("it ends too early");
      line_ += text_[at_] == '\n', depth += text_[at_] == '{', depth -= text_[at_] == '}';
    }
  }

  // PTX ISA 11.4 performance-tuning directives: each with a number, or three of them, of which the last two are 1.
  void limit(std::string_view text) {
    while (!(text = trimmed(text)).empty()) {
      const size_t end = text.find_first_of(" \t"), next = std::min(text.find('.', 1), text.size());
      const std::string_view name = text.substr(0, end), values = end == text.npos ? "" : text.substr(end, next - end);
      const int value = end == text.npos ? 0 : std::atoi(values.data());
      const auto numbers = split(values, ',');
      for (size_t i = 1; i < numbers.size(); i++) {
        if (numbers[i] != "1") fail(text);
      }
      if (name == ".reqntid")
        program_->threads = value;
      else if (name == ".maxntid")
        program_->most_threads = value;
      else if (name == ".maxnreg")
        program_->registers_of_thread = value;
      else if (name != ".minnctapersm")
        fail("unknown directive " + std::string(name));
      text = text.substr(next);
    }
  }

  static int bytes_of(std::string_view type) { return std::atoi(&type[2]) / 8; }

  // .param .align 8 .b8 name[16]
  static Variable declared(std::string_view text, int& alignment) {
    const std::vector<std::string_view> words = split(text, ' ');
    int bytes = 0;
    alignment = 0;
    for (size_t i = 0; i + 1 < words.size(); i++) {
      if (words[i] == ".align" && words[i - 1] != ".global") alignment = std::atoi(words[i + 1].data());
      if (words[i].size() > 2 && std::isdigit(words[i][2])) bytes = bytes_of(words[i]);
    }
    std::string_view name = words.back();
    if (size_t bracket = name.find('['); bracket != name.npos) {
      bytes *= std::atoi(&name[bracket + 1]);
      name = name.substr(0, bracket);
    }
    if (bytes == 0) fail("parameter " + std::string(text));
    if (alignment == 0) alignment = bytes;
    return {std::string(name), 0, bytes};
  }

  void parameter(std::string_view text) {
    int alignment, &end = program_->parameter_bytes;
    Variable x = declared(text, alignment);
    x.at = uint64_t(end = (end + alignment - 1) / alignment * alignment);
    program_->parameters.push_back(x);
    scopes_.back().names[x.name] = constant(x.at, 64);
    end += x.bytes;
  }

  // (.param .b32 result) name (.param .b64 x): a declaration, or the head of what follows.
  void function(const std::string& head) {
    const bool is_body = text_[at_ - 1] == '{';
    std::string rest = head;
    for (char& x : rest) x = x == '(' || x == ')' ? '|' : x;
    const auto parts = split(rest, '|');
    if (parts.size() != 3 || head[0] != '(' || head.back() != ')') fail(".func " + head);
    if (!is_body) return;
    const std::pair body{at_, line_};
    skip_body();
    functions_[std::string(parts[1])] = {std::string(parts[0]), std::string(parts[2]), body};
  }

  // The scopes that names are looked up in, from the innermost one on.
  std::vector<Scope*> visible() {
    std::vector<Scope*> result;
    for (size_t i = scopes_.size(); i-- > 0;) {
      result.push_back(&scopes_[i]);
      if (scopes_[i].is_function) i = 1;  // then the module's
    }
    return result;
  }

  std::shared_ptr<Argument> argument(std::string_view name) {
    for (Scope* scope : visible()) {
      if (const auto found = scope->arguments.find(name); found != scope->arguments.end()) return found->second;
    }
    return nullptr;
  }

  // PTX ISA 9.7.12.5 call, which the body of the function takes the place of: call.uni (result), name, (x, y);
  void call(const std::vector<std::string_view>& parts) {
    const auto list = [](std::string_view text) { return split(text.substr(1, text.size() - 2), ','); };
    if (parts.size() != 3 || parts[0][0] != '(' || parts[2][0] != '(') fail("another form of call");
    const auto found = functions_.find(std::string(parts[1]));
    if (found == functions_.end()) fail("unknown function " + std::string(parts[1]));
    if (scopes_.size() > 32) fail("calls within calls");
    const Function& to = found->second;
    Scope scope;
    scope.is_function = true;
    const auto pass = [&](const std::string& declarations, const std::vector<std::string_view>& given) {
      const auto taken = split(declarations, ',');
      if (taken.size() != given.size()) fail("another number of arguments");
      for (size_t i = 0; i < taken.size(); i++) {
        int alignment;
        const Variable x = declared(taken[i], alignment);
        const auto passed = argument(given[i]);
        if (!passed || passed->bytes != x.bytes) fail("another argument than " + std::string(taken[i]));
        scope.arguments[x.name] = passed;
      }
    };
    pass(to.result, list(parts[0])), pass(to.parameters, list(parts[2]));
    const std::pair here{at_, line_};
    const size_t depth = scopes_.size();
    std::tie(at_, line_) = to.body;
    scopes_.push_back(std::move(scope));
    while (scopes_.size() > depth) body_statement();
    std::tie(at_, line_) = here;
  }

  // st.param.b32 [x+4], %r1; or ld.param.b32 %r1, [x+4]; of what a call passes: false where it is of a kernel.
  bool pass(const std::string& opcode, const std::vector<std::string_view>& parts, Instruction& to) {
    const bool stores = starts_with(opcode, "st.param.");
    if ((!stores && !starts_with(opcode, "ld.param.")) || parts.size() != 2) return false;
    const std::string_view address = parts[!stores];
    const auto sides = split(address.substr(1, address.size() - 2), '+');
    const auto x = sides.empty() ? nullptr : argument(sides[0]);
    if (!x) return false;
    const int64_t offset = sides.size() > 1 ? integer(sides[1]).value : 0;
    const int bits = std::atoi(&opcode[10]);
    const auto rule = rules_.find("mov.b" + std::to_string(bits));
    if (rule == rules_.end() || bits < 32 || offset < 0 || offset * 8 % bits || offset + bits / 8 > x->bytes)
      fail(opcode + " of such a part");
    Operand& part = x->parts[{offset, bits}];
    if (part.at == 0 && !stores) fail("a part that nobody stored: " + std::string(address));
    if (part.at == 0) part = new_register(bits, std::string(address));
    const Form written("d" + std::to_string(bits)), read("s" + std::to_string(bits));
    to.rule = &rule->second;
    if (stores) to.operands.push_back(part);
    operand(parts[stores], stores ? read : written, to);
    if (!stores) to.operands.push_back(part);
    return true;
  }

  // .shared .align 4 .b8 name[16]; .extern .shared .align 16 .b8 name[]; .global .align 1 .b8 name[2] = {1, 2};
  void variable(std::string_view text) {
    const std::vector<std::string_view> sides = split(text, '='), words = split(sides[0], ' ');
    std::string_view name = words.back();
    const size_t bracket = std::min(name.find('['), name.size());
    const int count = bracket + 1 < name.size() ? std::atoi(&name[bracket + 1]) : 1;
    int alignment = 1, size = 0;
    for (size_t i = 0; i + 1 < words.size(); i++) {
      if (words[i] == ".align") alignment = std::atoi(words[i + 1].data());
      if (std::isdigit(words[i][2])) size = bytes_of(words[i]);
    }
    const std::string key(name.substr(0, bracket));
    if (starts_with(text, ".global")) {
      if (size != 1 || sides.size() != 2) fail(text);
      auto& bytes = program_->globals.emplace_back(std::make_unique<std::vector<char>>());
      for (auto x : split(sides[1].substr(1, sides[1].size() - 2), ',')) bytes->push_back(char(std::atoi(x.data())));
      if (bytes->size() > size_t(count)) fail(text);
      bytes->resize(count);  // the rest is 0
      scopes_.back().names[key] = constant(reinterpret_cast<uint64_t>(bytes->data()), 64);
      return;
    }
    int& end = program_->static_shared;
    end = (end + alignment - 1) / alignment * alignment;
    scopes_.back().names[key] = constant(uint64_t(end), 32);
    if (!starts_with(text, ".extern")) end += count * size;
  }

  void body_statement() {
    skip_space();
    if (at_ >= text_.size()) fail("it ends too early");
    if (text_[at_] == '{') {
      at_++, scopes_.emplace_back();
    } else if (text_[at_] == '}') {
      at_++, close_scope();
    } else if (text_[at_] == '.') {
      directive(until(";"));
    } else if (text_[at_] == '(' || text_[at_] == ')') {
      at_++;  // around nothing but comments
    } else {
      const size_t before = at_;
      if (std::string name = word(); name.size() > 1 && name.back() == ':') {
        name.pop_back();
        skip_space();
        if (starts_with(text_.substr(at_), ".branchtargets")) {
          word();
          const std::string labels = until(";");
          for (auto x : split(labels, ',')) scopes_.back().tables[name].emplace_back(x);
        } else if (!scopes_.back().labels.emplace(name, int(program_->instructions.size())).second) {
          fail("label " + name + " stands twice");
        }
      } else {
        at_ = before;
        const int line = line_;
        if (std::string text = until(";"); !text.empty()) instruction(text, line);
      }
    }
  }

  void close_scope() {
    Scope scope = std::move(scopes_.back());
    scopes_.pop_back();
    if (scope.is_function) scope.labels[kReturn] = int(program_->instructions.size());
    for (auto& [i, label] : scope.branches) {
      std::vector<std::string> labels{label};
      if (auto table = scope.tables.find(label); table != scope.tables.end()) labels = table->second;
      for (const std::string& x : labels) {
        if (auto found = scope.labels.find(x); found != scope.labels.end()) {
          program_->instructions[i].targets.push_back(found->second);
        } else if (scopes_.size() > 1 && !scope.is_function) {
          scopes_.back().branches.emplace_back(i, x);
        } else {
          fail("unknown label " + x);
        }
      }
    }
  }

  void directive(const std::string& text) {
    const std::vector<std::string_view> words = split(text, ' ');
    if (starts_with(text, ".shared")) return variable(text);
    if (starts_with(text, ".param")) {
      int alignment;
      const Variable x = declared(text, alignment);
      scopes_.back().arguments[x.name] = std::make_shared<Argument>(Argument{x.bytes, {}});
      return;
    }
    if (starts_with(text, ".pragma")) {
      if (size_t i = text.find("used_bytes_mask"); i != text.npos)
        used_bytes_ = uint32_t(std::strtoul(&text[i + 15], nullptr, 0));
      else if (text.find("nounroll") == text.npos)
        fail(text);
      return;
    }
    if (!starts_with(text, ".reg")) fail("unknown directive " + text);
    std::string_view rest = trimmed(std::string_view(text).substr(4));
    const size_t end = rest.find_first_of(" \t");
    const std::string_view type = rest.substr(0, end);
    const int bits = type == ".pred" ? 1 : 8 * bytes_of(type);
    for (auto name : split(rest.substr(end), ',')) {
      const size_t bracket = name.find('<');
      if (bracket == name.npos) {
        scopes_.back().names[std::string(name)] = new_register(bits, std::string(name));
        continue;
      }
      for (int i = 0, n = std::atoi(&name[bracket + 1]); i < n; i++) {
        const std::string each = std::string(name.substr(0, bracket)) + std::to_string(i);
        scopes_.back().names[each] = {0, bits};  // it gets its place where it is used
      }
    }
  }

  Operand new_register(int bits, std::string name) {
    std::vector<char>& file = program_->registers;
    const int at = int(file.size());
    file.resize(file.size() + sizeof(Register) + std::max(16, kLanes * bits / 8 / (bits == 1 ? kLanes : 1)));
    if (at == 0) return new_register(bits, name);  // 0 says that it has no place
    if (!name.empty()) program_->names.emplace_back(at, std::move(name));
    return {at, bits};
  }
  Operand constant(uint64_t value, int bits) {
    const auto [found, is_new] = constants_.try_emplace({value, bits});
    if (!is_new) return found->second;
    const Operand x = found->second = new_register(bits, "");
    Register& r = *reinterpret_cast<Register*>(program_->registers.data() + x.at);
    r.written = kAllLanes;
    if (bits == 1) *r.lanes<Lanes>() = value ? kAllLanes : 0;
    for (int i = 0; i < kLanes && bits > 1; i++) std::memcpy(r.lanes<char>() + i * bits / 8, &value, bits / 8);
    return x;
  }

  // A register, variable or parameter; its bits are 0 where there is none of that name.
  Operand named(std::string_view name) {
    for (Scope* scope : visible()) {
      const auto found = scope->names.find(name);
      if (found == scope->names.end()) continue;
      if (found->second.at == 0) found->second = new_register(found->second.bits, std::string(name));
      return found->second;
    }
    static const std::vector<std::string_view> special{"%laneid", "%tid.", "%ntid.", "%ctaid.", "%nctaid."};
    for (auto x : special) {
      if (!starts_with(name, x) || (name.size() != x.size() + (x.back() == '.'))) continue;
      if (x.back() == '.' && (name.back() < 'x' || name.back() > 'z')) continue;
      const Operand result = scopes_.front().names[std::string(name)] = new_register(32, std::string(name));
      program_->special.emplace_back(name, result.at);
      return result;
    }
    return {};
  }

  Operand integer(std::string_view text) {
    char* end = nullptr;
    const std::string copy(text);
    Operand x;
    x.value = copy[0] == '-' ? std::strtoll(copy.c_str(), &end, 0) : int64_t(std::strtoull(copy.c_str(), &end, 0));
    if (*end == 'U') end++;
    if (copy.empty() || *end) fail("neither a name nor a number: " + copy);
    return x;
  }

  // PTX ISA 4.5 constants and 6.4 operands.
  void operand(std::string_view text, const Form& form, Instruction& to) {
    const auto put = [&](Operand x) { to.operands.push_back(x); };
    if (form.role == 'm') {
      const auto parts = split(text.substr(1, text.size() - 2), ',');
      if (text[0] != '[' || text.back() != ']' || parts.size() != 2) fail("no box of a tensor: " + std::string(text));
      operand(parts[0], Form("s64"), to);
      operand(parts[1], Form(std::to_string(form.count) + "s32"), to);
    } else if (form.count || (text[0] == '{' && form.role != 'a')) {
      if (text[0] != '{' || text.back() != '}') fail("wants braces: " + std::string(text));
      const auto parts = split(text.substr(1, text.size() - 2), ',');
      if (int(parts.size()) != std::max(form.count, 1)) fail("has another number of parts: " + std::string(text));
      Form each = form;
      each.count = 0;
      for (auto part : parts) operand(part, each, to);
    } else if (form.role == 'a') {
      if (text[0] != '[' || text.back() != ']') fail("no address: " + std::string(text));
      const auto sides = split(text.substr(1, text.size() - 2), '+');
      if (sides.empty() || sides.size() > 2) fail(text);
      Operand x = named(sides[0]);
      if (x.bits == 0) fail("unknown " + std::string(sides[0]));
      if (sides.size() == 2) x.value = integer(sides[1]).value;
      put(x);
    } else if (form.role == 'i') {
      put(integer(text));
    } else if (form.role == 'l' || form.role == 't') {
      scopes_.back().branches.emplace_back(int(program_->instructions.size()), text);
    } else if (form.role == '_') {
      if (text != "_") fail("wants the sink");
    } else if (text == "_" && form.role == 'd') {
      put(new_register(64, ""));
    } else {
      Operand x = named(text);
      if (x.bits == 0 && form.role == 's') {
        if (starts_with(text, "0f") || starts_with(text, "0d")) {
          const size_t digits = form.bits == 32 && text[1] == 'f' ? 8 : form.bits == 64 && text[1] == 'd' ? 16 : 0;
          if (text.size() != digits + 2) fail("a float of another size: " + std::string(text));
          x = constant(std::strtoull(std::string(text.substr(2)).c_str(), nullptr, 16), form.bits);
        } else {
          const int64_t value = integer(text).value;
          x = constant(form.bits == 64 ? value : value & ((1ll << form.bits) - 1), form.bits);
        }
      }
      if (x.bits == 0) fail("unknown " + std::string(text));
      const bool symbol = text[0] != '%' && x.bits >= 32 && form.bits >= 32 && form.role == 's';
      const bool fits =
          form.wider ? x.bits >= form.bits && (x.bits > 1 || form.bits == 1) : x.bits == form.bits || symbol;
      if (!fits) fail("has " + std::to_string(x.bits) + " bits: " + std::string(text));
      if (symbol && x.bits != form.bits) {
        Register& r = *reinterpret_cast<Register*>(program_->registers.data() + x.at);
        x = constant(x.bits == 32 ? *r.lanes<uint32_t>() : *r.lanes<uint64_t>(), form.bits);
      }
      put(x);
    }
  }

  void instruction(std::string_view text, int line) {
    Instruction result;
    result.line = line, result.text = text;
    std::string_view rest = text;
    if (rest[0] == '@') {
      const size_t end = rest.find_first_of(" \t");
      std::string_view name = rest.substr(1, end - 1);
      if (name[0] == '!') result.guard_is = false, name.remove_prefix(1);
      const Operand guard = named(name);
      if (guard.bits != 1) fail("guard " + std::string(name));
      result.guard = guard.at;
      rest = trimmed(rest.substr(end));
    }
    const size_t end = std::min(rest.find_first_of(" \t"), rest.size());
    std::string opcode(rest.substr(0, end));
    std::vector<std::string_view> parts = split(rest.substr(end), ',');
    if (opcode == "mov.b32" || opcode == "mov.b64") {  // PTX ISA 9.7.9.3 mov, of vectors
      if (parts.size() == 2 && parts[0][0] == '{')
        opcode += " unpack" + std::to_string(split(parts[0].substr(1, parts[0].size() - 2), ',').size());
      if (parts.size() == 2 && parts[1][0] == '{')
        opcode += " pack" + std::to_string(split(parts[1].substr(1, parts[1].size() - 2), ',').size());
    }
    if (opcode == "call.uni" && result.guard < 0) return call(parts);
    if (pass(opcode, parts, result)) return program_->instructions.push_back(std::move(result));
    if (opcode == "ret" && std::any_of(scopes_.begin(), scopes_.end(), [](const Scope& y) { return y.is_function; }))
      opcode = "bra", parts.push_back(kReturn);
    if (starts_with(opcode, "wgmma.mma_async") && parts.size() > 1 && parts[1][0] == '{') opcode += " of registers";
    auto rule = rules_.find(opcode);
    if (rule == rules_.end())
      rule = rules_.find(opcode + " " + std::to_string(parts.size()));  // by the number of operands
    if (rule == rules_.end()) fail("unknown instruction " + std::string(text));
    result.rule = &rule->second;
    const std::vector<std::string_view> forms = split(rule->second.operands, ' ');
    if (forms.size() != parts.size()) fail("has another number of operands: " + std::string(text));
    for (size_t i = 0; i < forms.size(); i++) {
      const auto both = split(forms[i], '|'), given = split(parts[i], '|');
      if (given.size() > both.size()) fail(text);
      for (size_t j = 0; j < both.size(); j++) operand(j < given.size() ? given[j] : "_", Form(both[j]), result);
    }
    if (used_bytes_ != ~0u && !starts_with(opcode, "ld.")) fail("used_bytes_mask of " + opcode);
    result.used_bytes = std::exchange(used_bytes_, ~0u);
    program_->instructions.push_back(std::move(result));
  }

  std::string_view text_;
  const Rules& rules_;
  std::unique_ptr<Program> program_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Scope> scopes_;
  std::map<std::pair<uint64_t, int>, Operand> constants_;
  std::map<std::string, Function> functions_;
  std::pair<size_t, int> body_;  // of the kernel
  uint32_t used_bytes_ = ~0u;
};

}  // namespace ptx
