// SPDX-License-Identifier: GPL-2.0
/*
 * AMD's virtualization, as seen from a CPU that is Linux's: what a machine and
 * a vCPU of it are made of (AMD64 Architecture Programmer's Manual, volume 2,
 * chapter 15 and appendix B). What runs them is svm_run.c.
 */
#include <linux/mm.h>
#include <asm/cpufeature.h>
#include <asm/msr.h>
#include <asm/processor.h>
#include <asm/svm.h>

#include "regs.h"
#include "svm.h"
#include "vm.h"

/* Registers that the guest has for itself: they are in its control block, or the CPU's own APIC. */
static const u32 own_msrs[] = {
	MSR_FS_BASE, MSR_GS_BASE, MSR_KERNEL_GS_BASE,
	MSR_STAR, MSR_LSTAR, MSR_CSTAR, MSR_SYSCALL_MASK,
	MSR_IA32_SYSENTER_CS, MSR_IA32_SYSENTER_ESP, MSR_IA32_SYSENTER_EIP,
	MSR_IA32_CR_PAT, MSR_TSC_AUX,
};

#define X2APIC_FIRST	0x800
#define X2APIC_LAST	0x8ff
#define X2APIC_ID	0x802
#define X2APIC_LDR	0x80d
#define X2APIC_ICR	0x830

/* NMIs wait until the guest's IRET, which is looked for meanwhile. */
static void set_in_nmi(struct basalt_vcpu *vcpu, bool in_nmi)
{
	u32 *intercepts = &vcpu->vmcb->control.intercepts[INTERCEPT_IRET / 32];

	vcpu->in_nmi = in_nmi;
	if (in_nmi)
		*intercepts |= BIT(INTERCEPT_IRET % 32);
	else
		*intercepts &= ~BIT(INTERCEPT_IRET % 32);
}

/* What a guest may write to EFER. */
u64 basalt_svm_efer_bits __ro_after_init = EFER_SCE | EFER_LME | EFER_LMA | EFER_NX;

/**
 * basalt_svm_init() - looks which bits of EFER these CPUs have besides
 *
 * What a guest is not shown (segment limits in long mode, virtualization,
 * automatic IBRS) is none of them.
 */
void basalt_svm_init(void)
{
	if (boot_cpu_has(X86_FEATURE_FXSR_OPT))
		basalt_svm_efer_bits |= EFER_FFXSR;
	if (boot_cpu_has(X86_FEATURE_TCE))
		basalt_svm_efer_bits |= BASALT_EFER_TCE;
}

#define MSR_MAP_ORDER	1
#define IO_MAP_ORDER	2

/**
 * basalt_svm_usable() - whether this host's CPUs can be used
 *
 * Return: that; the firmware may have turned it off.
 */
bool basalt_svm_usable(void)
{
	u64 vm_cr;

	if (!boot_cpu_has(X86_FEATURE_SVM) || !boot_cpu_has(X86_FEATURE_NPT))
		return false;
	return !rdmsrl_safe(MSR_VM_CR, &vm_cr) && !(vm_cr & BIT(SVM_VM_CR_SVM_DISABLE));
}

/* Two bits for each register: intercept reading, intercept writing. */
static void let(u8 *map, u32 msr, bool read, bool write)
{
	u32 bit = (msr & 0x1fff) * 2;

	switch (msr >> 13) {
	case 0:
		break;
	case 0xc0000000 >> 13:
		map += 0x800;
		break;
	case 0xc0010000 >> 13:
		map += 0x1000;
		break;
	default:
		return;
	}
	if (read)
		map[bit / 8] &= ~BIT(bit % 8);
	if (write)
		map[bit / 8] &= ~BIT(bit % 8 + 1);
}

/* The same for one whose number is below 0x2000, undone. */
static void forbid(u8 *map, u32 msr)
{
	map[msr * 2 / 8] |= 3 << msr * 2 % 8;
}

/**
 * basalt_svm_init_vm() - what all vCPUs of a machine have in common
 * @vm: of which
 *
 * Return: 0 or -ENOMEM.
 */
int basalt_svm_init_vm(struct basalt_vm *vm)
{
	unsigned int index;
	u32 msr;

	vm->msr_map = (void *)__get_free_pages(GFP_KERNEL_ACCOUNT, MSR_MAP_ORDER);
	vm->io_map = (void *)__get_free_pages(GFP_KERNEL_ACCOUNT, IO_MAP_ORDER);
	if (!vm->msr_map || !vm->io_map)
		return -ENOMEM;
	memset(vm->msr_map, 0xff, PAGE_SIZE << MSR_MAP_ORDER);
	memset(vm->io_map, 0xff, PAGE_SIZE << IO_MAP_ORDER);
	for (index = 0; index < ARRAY_SIZE(own_msrs); index++)
		let(vm->msr_map, own_msrs[index], true, true);
	let(vm->msr_map, MSR_IA32_TSC, true, false);
	/* What is sent to others is looked at first, and which APIC this is, is nobody's business. */
	for (msr = X2APIC_FIRST; msr <= X2APIC_LAST; msr++)
		let(vm->msr_map, msr, msr != X2APIC_ID && msr != X2APIC_LDR && msr != X2APIC_ICR, msr != X2APIC_ICR);
	return 0;
}

/**
 * basalt_svm_free_vm() - gives that back
 * @vm: of which, however far its making came
 */
void basalt_svm_free_vm(struct basalt_vm *vm)
{
	free_pages((unsigned long)vm->msr_map, MSR_MAP_ORDER);
	free_pages((unsigned long)vm->io_map, IO_MAP_ORDER);
}

static void intercept(struct vmcb *vmcb, u32 what)
{
	vmcb->control.intercepts[what / 32] |= BIT(what % 32);
}

/* As after power on: real mode, at the reset vector (volume 2, 14.1.3). */
static void power_on(struct vmcb_save_area *save)
{
	struct vmcb_seg data = { .attrib = 0x093, .limit = 0xffff };
	struct vmcb_seg code = { .attrib = 0x09b, .limit = 0xffff, .selector = 0xf000, .base = 0xffff0000 };
	struct vmcb_seg table = { .limit = 0xffff };

	save->es = data;
	save->ss = data;
	save->ds = data;
	save->fs = data;
	save->gs = data;
	save->cs = code;
	save->gdtr = table;
	save->idtr = table;
	save->ldtr = (struct vmcb_seg){ .attrib = 0x082, .limit = 0xffff };
	save->tr = (struct vmcb_seg){ .attrib = 0x08b, .limit = 0xffff };
	save->cr0 = X86_CR0_ET;
	save->dr6 = 0xffff0ff0;
	save->dr7 = 0x400;
	save->rflags = X86_EFLAGS_FIXED;
	save->rip = 0xfff0;
	save->efer = EFER_SVME;
	save->g_pat = 0x0007040600070406ULL;
}

/**
 * basalt_svm_init_vcpu() - a vCPU as it is after power on
 * @vcpu: which; its pages are zeroes
 */
void basalt_svm_init_vcpu(struct basalt_vcpu *vcpu)
{
	static const u32 always[] = {
		INTERCEPT_NMI, INTERCEPT_SHUTDOWN, INTERCEPT_CPUID, INTERCEPT_IOIO_PROT, INTERCEPT_MSR_PROT,
		INTERCEPT_VMRUN, INTERCEPT_VMMCALL, INTERCEPT_VMLOAD, INTERCEPT_VMSAVE, INTERCEPT_STGI,
		INTERCEPT_CLGI, INTERCEPT_SKINIT, INTERCEPT_INVLPGA, INTERCEPT_INVD, INTERCEPT_WBINVD,
		INTERCEPT_RDPMC, INTERCEPT_EXCEPTION_OFFSET + MC_VECTOR,
	};
	struct vmcb *vmcb = vcpu->vmcb;
	unsigned int index;

	BUILD_BUG_ON(offsetof(struct basalt_regs, rbx) != BASALT_RBX);
	BUILD_BUG_ON(offsetof(struct basalt_regs, rcx) != BASALT_RCX);
	BUILD_BUG_ON(offsetof(struct basalt_regs, rdx) != BASALT_RDX);
	BUILD_BUG_ON(offsetof(struct basalt_regs, rsi) != BASALT_RSI);
	BUILD_BUG_ON(offsetof(struct basalt_regs, rdi) != BASALT_RDI);
	BUILD_BUG_ON(offsetof(struct basalt_regs, rbp) != BASALT_RBP);
	BUILD_BUG_ON(offsetof(struct basalt_regs, r8) != BASALT_R8);
	BUILD_BUG_ON(offsetof(struct basalt_regs, r15) != BASALT_R15);
	for (index = 0; index < ARRAY_SIZE(always); index++)
		intercept(vmcb, always[index]);
	vmcb->control.iopm_base_pa = __pa(vcpu->vm->io_map);
	vmcb->control.msrpm_base_pa = __pa(vcpu->vm->msr_map);
	if (!vcpu->vm->identity) {
		vmcb->control.nested_ctl = SVM_NESTED_CTL_NP_ENABLE;
		vmcb->control.nested_cr3 = __pa(vcpu->vm->tables.root);
	}
	/* No other guest ever runs here. */
	vmcb->control.asid = 1;
	vmcb->control.tlb_ctl = TLB_CONTROL_FLUSH_ALL_ASID;
	power_on(&vmcb->save);
	vcpu->vmcb_pa = __pa(vmcb);
	vcpu->host_pa = __pa(vcpu->host);
	vcpu->save_pa = __pa(vcpu->save);
}

/**
 * basalt_svm_freeze() - from now on it runs in the place of others, on their CPUs
 * @vcpu: which; it does not run, and is the only one of its machine
 *
 * Interrupts, and the APIC, are theirs whose CPU it is: an interrupt makes it
 * come out (15.13, 15.21.1), priorities that it sets are not theirs, and what
 * it does to its APIC is nobody's (basalt_switch()).
 */
void basalt_svm_freeze(struct basalt_vcpu *vcpu)
{
	struct vmcb *vmcb = vcpu->vmcb;
	u32 msr;

	intercept(vmcb, INTERCEPT_INTR);
	intercept(vmcb, INTERCEPT_HLT);
	intercept(vmcb, INTERCEPT_MWAIT);
	intercept(vmcb, INTERCEPT_MWAIT_COND);
	intercept(vmcb, INTERCEPT_MONITOR);
	vmcb->control.int_ctl |= V_INTR_MASKING_MASK;
	/* The other one is the guest's whose CPU it is. */
	vmcb->control.asid = 2;
	for (msr = X2APIC_FIRST; msr <= X2APIC_LAST; msr++)
		forbid(vcpu->vm->msr_map, msr);
}

static struct basalt_segment segment(const struct vmcb_seg *seg)
{
	return (struct basalt_segment){
		.base = seg->base,
		.limit = seg->limit,
		.selector = seg->selector,
		.attributes = seg->attrib,
	};
}

static struct vmcb_seg seg(const struct basalt_segment *segment)
{
	return (struct vmcb_seg){
		.base = segment->base,
		.limit = segment->limit,
		.selector = segment->selector,
		.attrib = segment->attributes,
	};
}

/**
 * basalt_svm_get_state() - what a vCPU is that does not run
 * @vcpu: which
 * @state: where; zeroes
 */
void basalt_svm_get_state(struct basalt_vcpu *vcpu, struct basalt_state *state)
{
	const struct vmcb_save_area *save = &vcpu->vmcb->save;

	state->regs = vcpu->regs;
	state->regs.rax = save->rax;
	state->regs.rsp = save->rsp;
	state->regs.rip = save->rip;
	state->regs.rflags = save->rflags;
	state->es = segment(&save->es);
	state->cs = segment(&save->cs);
	state->ss = segment(&save->ss);
	state->ds = segment(&save->ds);
	state->fs = segment(&save->fs);
	state->gs = segment(&save->gs);
	state->gdtr = segment(&save->gdtr);
	state->ldtr = segment(&save->ldtr);
	state->idtr = segment(&save->idtr);
	state->tr = segment(&save->tr);
	state->cr0 = save->cr0;
	state->cr2 = save->cr2;
	state->cr3 = save->cr3;
	state->cr4 = save->cr4;
	state->dr6 = save->dr6;
	state->dr7 = save->dr7;
	state->efer = save->efer & ~EFER_SVME;
	state->pat = save->g_pat;
	state->star = save->star;
	state->lstar = save->lstar;
	state->cstar = save->cstar;
	state->sfmask = save->sfmask;
	state->kernel_gs_base = save->kernel_gs_base;
	state->sysenter_cs = save->sysenter_cs;
	state->sysenter_esp = save->sysenter_esp;
	state->sysenter_eip = save->sysenter_eip;
	/* What SYSRET has left in the stack segment need not be the privilege level. */
	state->ss.attributes = (state->ss.attributes & ~(3 << 5)) | save->cpl << 5;
	state->tsc_offset = vcpu->vmcb->control.tsc_offset;
	state->interruptibility = vcpu->vmcb->control.int_state & SVM_INTERRUPT_SHADOW_MASK ? BASALT_STATE_SHADOW : 0;
	if (vcpu->in_nmi)
		state->interruptibility |= BASALT_STATE_IN_NMI;
	if (READ_ONCE(vcpu->nmi))
		state->interruptibility |= BASALT_STATE_NMI;
	if (vcpu->vmcb->control.event_inj & SVM_EVTINJ_VALID)
		state->event = vcpu->vmcb->control.event_inj | (u64)vcpu->vmcb->control.event_inj_err << 32;
}

/**
 * basalt_svm_bears() - whether a vCPU can be made so
 * @state: what is asked for
 *
 * What else makes no sense the CPU refuses at the entry. The types of memory
 * are written to a register where nobody translates, and that would fault.
 *
 * Return: that.
 */
bool basalt_svm_bears(const struct basalt_state *state)
{
	unsigned int shift;

	/* Of 7.8.1: 2 and 3 are no type, and no more than three bits are used. */
	for (shift = 0; shift < 64; shift += 8) {
		u8 type = state->pat >> shift;

		if (type > 7 || type == 2 || type == 3)
			return false;
	}
	return true;
}

/* The CPU may remember what its page tables said; what changes that from within makes it forget. */
static bool translates_otherwise(const struct vmcb_save_area *save, const struct basalt_state *state)
{
	return save->cr0 != state->cr0 || save->cr3 != state->cr3 || save->cr4 != state->cr4 ||
	       save->g_pat != state->pat || (save->efer ^ state->efer) & ~EFER_SVME;
}

/**
 * basalt_svm_set_state() - makes a vCPU that does not run another
 * @vcpu: which
 * @state: what; basalt_svm_bears() it, and the CPU itself refuses what else makes no sense
 */
void basalt_svm_set_state(struct basalt_vcpu *vcpu, const struct basalt_state *state)
{
	struct vmcb_save_area *save = &vcpu->vmcb->save;

	if (translates_otherwise(save, state))
		WRITE_ONCE(vcpu->flush, true);
	vcpu->regs = state->regs;
	save->rax = state->regs.rax;
	save->rsp = state->regs.rsp;
	save->rip = state->regs.rip;
	save->rflags = state->regs.rflags;
	save->es = seg(&state->es);
	save->cs = seg(&state->cs);
	save->ss = seg(&state->ss);
	save->ds = seg(&state->ds);
	save->fs = seg(&state->fs);
	save->gs = seg(&state->gs);
	save->gdtr = seg(&state->gdtr);
	save->ldtr = seg(&state->ldtr);
	save->idtr = seg(&state->idtr);
	save->tr = seg(&state->tr);
	/* The privilege level is the stack segment's. */
	save->cpl = (state->ss.attributes >> 5) & 3;
	save->cr0 = state->cr0;
	save->cr2 = state->cr2;
	save->cr3 = state->cr3;
	save->cr4 = state->cr4;
	save->dr6 = state->dr6;
	save->dr7 = state->dr7;
	save->efer = state->efer | EFER_SVME;
	save->g_pat = state->pat;
	save->star = state->star;
	save->lstar = state->lstar;
	save->cstar = state->cstar;
	save->sfmask = state->sfmask;
	save->kernel_gs_base = state->kernel_gs_base;
	save->sysenter_cs = state->sysenter_cs;
	save->sysenter_esp = state->sysenter_esp;
	save->sysenter_eip = state->sysenter_eip;
	vcpu->vmcb->control.tsc_offset = state->tsc_offset;
	vcpu->vmcb->control.int_state = state->interruptibility & BASALT_STATE_SHADOW ? SVM_INTERRUPT_SHADOW_MASK : 0;
	vcpu->vmcb->control.event_inj = state->event;
	vcpu->vmcb->control.event_inj_err = state->event >> 32;
	set_in_nmi(vcpu, state->interruptibility & BASALT_STATE_IN_NMI);
	if (state->interruptibility & (BASALT_STATE_NO_NMI | BASALT_STATE_NMI))
		WRITE_ONCE(vcpu->nmi, state->interruptibility & BASALT_STATE_NMI);
	vcpu->answer = BASALT_EXIT_INTERRUPTED;
}
