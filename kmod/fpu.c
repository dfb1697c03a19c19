// SPDX-License-Identifier: GPL-2.0
/*
 * What of a CPU is neither in its control block nor its APIC's: x87, SSE and
 * what XCR0 and XSS switch on, debug addresses, TSC_AUX. A guest keeps its own there
 * while it has the CPU; the next one, and Linux, find nothing of it. On a CPU
 * that Linux believes to be dead: the same holds as in parked.c.
 */
#include <asm/cpufeature.h>
#include <asm/fpu/types.h>
#include <asm/fpu/xcr.h>
#include <asm/msr.h>

#include "vm.h"

/* As a processor has it after INIT: no state in use, and SSE's exceptions masked. */
static struct {
	struct fxregs_state legacy;
	struct xstate_header header;
} clean __aligned(64) = { .legacy = { .cwd = 0x37f, .mxcsr = 0x1f80 } };

/* CPUs that Linux has made alike: asked once, as what answers may be patched in later. */
static bool has_xsave, has_xss, has_tsc_aux;

/**
 * basalt_fpu_init() - finds out what this host's CPUs have
 */
void basalt_fpu_init(void)
{
	has_xsave = boot_cpu_has(X86_FEATURE_OSXSAVE);
	has_xss = boot_cpu_has(X86_FEATURE_XSAVES);
	has_tsc_aux = boot_cpu_has(X86_FEATURE_RDTSCP) || boot_cpu_has(X86_FEATURE_RDPID);
}

static void notrace forget(void)
{
	if (has_xsave)
		asm volatile("xrstor64 %0" : : "m" (clean), "a" (-1), "d" (-1) : "memory");
	else
		asm volatile("fxrstor64 %0" : : "m" (clean.legacy));
	asm volatile("mov %0, %%db0\n\tmov %0, %%db1\n\tmov %0, %%db2\n\tmov %0, %%db3" : : "r" (0UL));
}

/**
 * basalt_fpu_keep() - keeps what is Linux's
 * @self: what is known of this CPU
 */
void notrace basalt_fpu_keep(struct basalt_cpu *self)
{
	if (has_xsave)
		self->xcr0 = xgetbv(XCR_XFEATURE_ENABLED_MASK);
	if (has_xss)
		self->xss = __rdmsr(MSR_IA32_XSS);
	if (has_tsc_aux)
		self->tsc_aux = __rdmsr(MSR_TSC_AUX);
}

/**
 * basalt_fpu_for_guest() - as after power on; for a guest that has not run
 * @self: what is known of this CPU
 */
void notrace basalt_fpu_for_guest(struct basalt_cpu *self)
{
	/* What an earlier guest had switched off is forgotten as well. */
	if (has_xsave)
		xsetbv(XCR_XFEATURE_ENABLED_MASK, self->xcr0);
	forget();
	if (has_xsave)
		xsetbv(XCR_XFEATURE_ENABLED_MASK, XFEATURE_MASK_FP);
	/* From 6.6 on Linux has shadow stacks there. No guest changes it: what it writes goes to user space. */
	if (has_xss)
		__wrmsr(MSR_IA32_XSS, 0, 0);
	if (has_tsc_aux)
		__wrmsr(MSR_TSC_AUX, 0, 0);
}

/**
 * basalt_fpu_restore() - as Linux had it, with nothing of a guest's
 * @self: what is known of this CPU
 */
void notrace basalt_fpu_restore(struct basalt_cpu *self)
{
	if (has_xsave)
		xsetbv(XCR_XFEATURE_ENABLED_MASK, self->xcr0);
	forget();
	if (has_xss)
		__wrmsr(MSR_IA32_XSS, (u32)self->xss, self->xss >> 32);
	if (has_tsc_aux)
		__wrmsr(MSR_TSC_AUX, (u32)self->tsc_aux, self->tsc_aux >> 32);
}
