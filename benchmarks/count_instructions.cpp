// A plugin of qemu: counts the instructions that a program executes, and prints them at each `hint #100` of it.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

extern "C" {

// Of qemu-plugin.h, which Debian's qemu-user lacks.
struct qemu_plugin_tb;
struct qemu_plugin_insn;
int qemu_plugin_version = 1;
size_t qemu_plugin_tb_n_insns(const qemu_plugin_tb*);
qemu_plugin_insn* qemu_plugin_tb_get_insn(const qemu_plugin_tb*, size_t);
const void* qemu_plugin_insn_data(const qemu_plugin_insn*);
void qemu_plugin_register_vcpu_tb_exec_inline(qemu_plugin_tb*, int, void*, uint64_t);
void qemu_plugin_register_vcpu_insn_exec_cb(qemu_plugin_insn*, void (*)(unsigned, void*), int, void*);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t, void (*)(uint64_t, qemu_plugin_tb*));

static uint64_t all, products;

static void print(unsigned, void*) {
  fprintf(stderr, "%.1f million instructions, of them %.1f fmla or bfmmla\n", all / 1e6, products / 1e6);
  all = products = 0;
}

static void count(uint64_t, qemu_plugin_tb* block) {
  const size_t n = qemu_plugin_tb_n_insns(block);
  uint64_t of_block = 0;
  for (size_t i = 0; i < n; ++i) {
    qemu_plugin_insn* instruction = qemu_plugin_tb_get_insn(block, i);
    uint32_t code;
    memcpy(&code, qemu_plugin_insn_data(instruction), sizeof code);
    of_block += (code & 0xffe0fc00) == 0x4e20cc00;  // fmla of four floats
    of_block += (code & 0xffc0f400) == 0x4f801000;  // by one float
    of_block += (code & 0xffe0fc00) == 0x6e40ec00;  // bfmmla
    if (code == 0xd5032c9f) qemu_plugin_register_vcpu_insn_exec_cb(instruction, print, 0, nullptr);
  }
  qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &all, n);
  qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &products, of_block);
}

int qemu_plugin_install(uint64_t id, const void*, int, char**) {
  qemu_plugin_register_vcpu_tb_trans_cb(id, count);
  return 0;
}
}
