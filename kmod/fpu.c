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

/* What of a guest is saved: what fits into struct basalt_context, which is all but AMX. */
#define SAVED	(XFEATURE_MASK_FP | XFEATURE_MASK_SSE | XFEATURE_MASK_YMM | XFEATURE_MASK_BNDREGS | \
		 XFEATURE_MASK_BNDCSR | XFEATURE_MASK_AVX512 | XFEATURE_MASK_PKRU)

/* Those of them that there are, and the bits that MXCSR has. */
static u64 saved;
static u32 mxcsr_bits;

/* Of a processor that does not say which bits its MXCSR has (volume 1, 11.5.10). */
#define MXCSR_BITS	0xffbf

/* Of an XSAVE area in its standard format: behind the legacy part, whose last bytes are nobody's, is the header. */
#define HEADER	512

/**
 * basalt_fpu_init() - finds out what this host's CPUs have
 */
void basalt_fpu_init(void)
{
	static struct fxregs_state image __aligned(16);

	has_xsave = boot_cpu_has(X86_FEATURE_OSXSAVE);
	has_xss = boot_cpu_has(X86_FEATURE_XSAVES);
	has_tsc_aux = boot_cpu_has(X86_FEATURE_RDTSCP) || boot_cpu_has(X86_FEATURE_RDPID);
	saved = (has_xsave ? xgetbv(XCR_XFEATURE_ENABLED_MASK) : XFEATURE_MASK_FPSSE) & SAVED;
	/* Whoever's state that is: nothing is taken of it but what the processor says of itself. */
	asm volatile("fxsave64 %0" : "=m" (image));
	mxcsr_bits = image.mxcsr_mask ? image.mxcsr_mask : MXCSR_BITS;
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

/* What XSETBV takes of what Linux has switched on (volume 2, 11.5.2). */
static bool is_xcr0(u64 value)
{
	if (!has_xsave)
		return value == XFEATURE_MASK_FP;
	if (!(value & XFEATURE_MASK_FP) || value & ~xgetbv(XCR_XFEATURE_ENABLED_MASK))
		return false;
	if (value & XFEATURE_MASK_YMM && !(value & XFEATURE_MASK_SSE))
		return false;
	if (value & XFEATURE_MASK_AVX512 &&
	    (!(value & XFEATURE_MASK_YMM) || (value & XFEATURE_MASK_AVX512) != XFEATURE_MASK_AVX512))
		return false;
	if (!!(value & XFEATURE_MASK_BNDREGS) != !!(value & XFEATURE_MASK_BNDCSR))
		return false;
	return !(value & XFEATURE_MASK_XTILE) || (value & XFEATURE_MASK_XTILE) == XFEATURE_MASK_XTILE;
}

/**
 * basalt_fpu_bears() - whether a CPU can be made so, without a fault
 * @context: what is asked for
 *
 * Return: that.
 */
bool basalt_fpu_bears(const struct basalt_context *context)
{
	const struct fxregs_state *legacy = (const void *)context->xsave;
	const struct xstate_header *header = (const void *)(context->xsave + HEADER);

	if (!is_xcr0(context->xcr0) || legacy->mxcsr & ~mxcsr_bits || context->tsc_aux > U32_MAX)
		return false;
	return !(header->xfeatures & ~saved) && !header->xcomp_bv &&
	       !memchr_inv(header->reserved, 0, sizeof(header->reserved));
}

/**
 * basalt_fpu_save() - reads what a guest that does not run has left there
 * @self: what is known of this CPU
 * @context: where to; its XSAVE area is zeroes
 */
void notrace basalt_fpu_save(struct basalt_cpu *self, struct basalt_context *context)
{
	context->xcr0 = XFEATURE_MASK_FP;
	if (has_xsave) {
		context->xcr0 = xgetbv(XCR_XFEATURE_ENABLED_MASK);
		/* Also what it has switched off for now. */
		xsetbv(XCR_XFEATURE_ENABLED_MASK, self->xcr0);
		asm volatile("xsave64 %0" : "+m" (context->xsave) : "a" ((u32)saved), "d" (saved >> 32) : "memory");
		xsetbv(XCR_XFEATURE_ENABLED_MASK, context->xcr0);
	} else {
		struct xstate_header *header = (void *)(context->xsave + HEADER);

		asm volatile("fxsave64 %0" : "=m" (*(struct fxregs_state *)context->xsave));
		header->xfeatures = saved;
	}
	asm volatile("mov %%db0, %0\n\tmov %%db1, %1\n\tmov %%db2, %2\n\tmov %%db3, %3"
		     : "=r" (context->dr[0]), "=r" (context->dr[1]), "=r" (context->dr[2]), "=r" (context->dr[3]));
	if (has_tsc_aux)
		context->tsc_aux = __rdmsr(MSR_TSC_AUX);
}

/**
 * basalt_fpu_load() - makes it what a guest is to find
 * @self: what is known of this CPU
 * @context: what; basalt_fpu_bears() it
 */
void notrace basalt_fpu_load(struct basalt_cpu *self, const struct basalt_context *context)
{
	if (has_xsave) {
		xsetbv(XCR_XFEATURE_ENABLED_MASK, self->xcr0);
		/* What is not read from there is nobody's. */
		if (self->xcr0 & ~saved)
			forget();
		asm volatile("xrstor64 %0" : : "m" (context->xsave), "a" ((u32)saved), "d" (saved >> 32) : "memory");
		xsetbv(XCR_XFEATURE_ENABLED_MASK, context->xcr0);
	} else {
		asm volatile("fxrstor64 %0" : : "m" (*(const struct fxregs_state *)context->xsave));
	}
	asm volatile("mov %0, %%db0\n\tmov %1, %%db1\n\tmov %2, %%db2\n\tmov %3, %%db3"
		     : : "r" (context->dr[0]), "r" (context->dr[1]), "r" (context->dr[2]), "r" (context->dr[3]));
	if (has_tsc_aux)
		__wrmsr(MSR_TSC_AUX, (u32)context->tsc_aux, context->tsc_aux >> 32);
}
