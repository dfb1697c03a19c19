// SPDX-License-Identifier: GPL-2.0
/*
 * AMD's virtualization on a CPU that Linux believes to be dead: the same holds
 * as in parked.c. Sections cited are those of the AMD64 Architecture
 * Programmer's Manual, volume 2.
 *
 * External interrupts, HLT and the local APIC are the guest's and cause no
 * exit. Of what does, this file answers what needs nobody else: CPUID, EFER,
 * NMIs, interrupts between vCPUs, and instructions that no guest may have.
 * Everything else goes to user space.
 */
#include <linux/compiler.h>
#include <asm/apicdef.h>
#include <asm/cpuid.h>
#include <asm/irq_vectors.h>
#include <asm/msr.h>
#include <asm/msr-index.h>
#include <asm/processor-flags.h>
#include <asm/svm.h>
#include <asm/trapnr.h>
#include <asm/tsc.h>

#include "svm.h"
#include "vm.h"

#define X2APIC(register)	(APIC_BASE_MSR + ((register) >> 4))

static __always_inline void count(struct basalt_vcpu *vcpu, enum basalt_count what)
{
	vcpu->run->counts[what]++;
}

/* From here on the CPU has virtualization, and an APIC in the mode that the guest sees. */
static void notrace enable(struct basalt_cpu *self)
{
	u64 base = __rdmsr(MSR_IA32_APICBASE), efer = __rdmsr(MSR_EFER) | EFER_SVME;

	self->apic_base = base;
	self->pat = __rdmsr(MSR_IA32_CR_PAT);
	basalt_fpu_keep(self);
	basalt_predict_for_guests(self);
	if (!(base & X2APIC_ENABLE)) {
		base |= X2APIC_ENABLE;
		__wrmsr(MSR_IA32_APICBASE, (u32)base, base >> 32);
	}
	__wrmsr(MSR_EFER, (u32)efer, efer >> 32);
	self->enabled = true;
}

/* The first run of a vCPU finds nothing of who was here before. */
static void notrace begin(struct basalt_cpu *self, struct basalt_vcpu *vcpu)
{
	if (!self->enabled)
		enable(self);
	basalt_lapic_drain();
	vcpu->timer_khz = basalt_lapic_timer_khz(tsc_khz);
	basalt_predict_nothing();
	basalt_fpu_for_guest(self);
	__wrmsr(MSR_VM_HSAVE_PA, (u32)vcpu->save_pa, vcpu->save_pa >> 32);
	vcpu->ran = true;
}

/**
 * basalt_svm_leave() - makes the CPU what Linux has left
 * @self: what is known of this CPU
 */
void notrace basalt_svm_leave(struct basalt_cpu *self)
{
	u64 base = self->apic_base, efer = __rdmsr(MSR_EFER) & ~EFER_SVME;

	basalt_lapic_drain();
	basalt_predict_nothing();
	basalt_fpu_restore(self);
	basalt_predict_restore(self);
	__wrmsr(MSR_VM_HSAVE_PA, 0, 0);
	__wrmsr(MSR_EFER, (u32)efer, efer >> 32);
	if (!(base & X2APIC_ENABLE)) {
		/* There is no way back but by way of none (16.10). */
		u64 none = base & ~(u64)(X2APIC_ENABLE | XAPIC_ENABLE);

		__wrmsr(MSR_IA32_APICBASE, (u32)none, none >> 32);
		__wrmsr(MSR_IA32_APICBASE, (u32)base, base >> 32);
	}
	self->enabled = false;
}

/**
 * basalt_svm_wake() - interrupts a CPU that is Linux's; this one has run a guest
 * @command: of basalt_wake_command()
 */
void notrace basalt_svm_wake(u64 command)
{
	__wrmsr(X2APIC(APIC_ICR), (u32)command, command >> 32);
}

static __always_inline void skip(struct basalt_vcpu *vcpu, u64 rip)
{
	vcpu->vmcb->save.rip = rip;
	vcpu->vmcb->control.int_state &= ~SVM_INTERRUPT_SHADOW_MASK;
}

static __always_inline void fault(struct basalt_vcpu *vcpu, u8 vector, bool with_error)
{
	vcpu->vmcb->control.event_inj = vector | SVM_EVTINJ_TYPE_EXEPT | SVM_EVTINJ_VALID |
					(with_error ? SVM_EVTINJ_VALID_ERR : 0);
	vcpu->vmcb->control.event_inj_err = 0;
}

static void notrace do_cpuid(struct basalt_vcpu *vcpu)
{
	const struct basalt_cpuid *cpuid = vcpu->vm->cpuid;
	u32 function = vcpu->vmcb->save.rax, index = vcpu->regs.rcx, entry;
	u32 eax = 0, ebx = 0, ecx = 0, edx = 0;

	for (entry = 0; cpuid && entry < cpuid->count; entry++) {
		const struct basalt_cpuid_entry *e = &cpuid->entries[entry];

		if (e->function != function || (e->flags & BASALT_CPUID_INDEX && e->index != index))
			continue;
		eax = e->eax;
		ebx = e->ebx;
		ecx = e->ecx;
		edx = e->edx;
		break;
	}
	switch (function) {
	case 1:
		ebx = (ebx & 0x00ffffff) | vcpu->apic_id << 24;
		/* OSXSAVE says what the guest's kernel has done. */
		ecx = (ecx & ~BIT(27)) | (vcpu->vmcb->save.cr4 & X86_CR4_OSXSAVE ? BIT(27) : 0);
		break;
	case 0xb:
	case 0x1f:
		edx = vcpu->apic_id;
		break;
	case 0x8000001e:
		eax = vcpu->apic_id;
		break;
	}
	vcpu->vmcb->save.rax = eax;
	vcpu->regs.rbx = ebx;
	vcpu->regs.rcx = ecx;
	vcpu->regs.rdx = edx;
	skip(vcpu, vcpu->vmcb->save.rip + 2);
}

/* Something that no guest may do. */
static __always_inline void refuse(struct basalt_vcpu *vcpu, u8 vector, bool with_error)
{
	count(vcpu, BASALT_COUNT_REFUSED);
	fault(vcpu, vector, with_error);
}

/* Tells whether user space is needed. */
static bool notrace do_icr(struct basalt_vcpu *vcpu, u64 value)
{
	vcpu->icr = value;
	switch (basalt_icr_write(vcpu, value)) {
	case BASALT_SENT_BY_USER:
		return true;
	case BASALT_SENT_NOBODY:
		count(vcpu, BASALT_COUNT_REFUSED);
		break;
	case BASALT_SENT:
		break;
	}
	skip(vcpu, vcpu->vmcb->save.rip + 2);
	return false;
}

static __always_inline void answer(struct basalt_vcpu *vcpu, u64 value)
{
	vcpu->vmcb->save.rax = (u32)value;
	vcpu->regs.rdx = value >> 32;
	skip(vcpu, vcpu->vmcb->save.rip + 2);
}

/* The registers of which the CPU's own would tell its physical id. Tells whether this is one. */
static bool notrace do_identity(struct basalt_vcpu *vcpu, u32 index)
{
	switch (index) {
	case X2APIC(APIC_ID):
		answer(vcpu, vcpu->apic_id);
		return true;
	case X2APIC(APIC_LDR):
		answer(vcpu, basalt_logical_id(vcpu->apic_id));
		return true;
	case X2APIC(APIC_ICR):
		answer(vcpu, vcpu->icr);
		return true;
	default:
		return false;
	}
}

/* Whether a processor would take it (3.1.7): no bit that it has not, and long mode neither switched under paging nor told to be active. */
static bool notrace is_for_efer(const struct vmcb_save_area *save, u64 value)
{
	u64 changed = value ^ save->efer;

	if (value & ~basalt_svm_efer_bits || changed & EFER_LMA)
		return false;
	return !(changed & EFER_LME && save->cr0 & X86_CR0_PG);
}

/* Tells whether user space is needed. */
static bool notrace do_msr(struct basalt_vcpu *vcpu)
{
	struct vmcb_save_area *save = &vcpu->vmcb->save;
	bool write = vcpu->vmcb->control.exit_info_1;
	u64 value = (u32)save->rax | vcpu->regs.rdx << 32;
	u32 index = vcpu->regs.rcx;

	count(vcpu, index == X2APIC(APIC_ICR) ? BASALT_COUNT_ICR : BASALT_COUNT_MSR);
	if (write ? index == X2APIC(APIC_ICR) && !do_icr(vcpu, value) : do_identity(vcpu, index))
		return false;
	if (index != MSR_EFER) {
		vcpu->run->msr.index = index;
		vcpu->run->msr.write = write;
		vcpu->run->msr.fault = 0;
		vcpu->run->msr.value = write ? value : 0;
		return true;
	}
	if (write) {
		if (!is_for_efer(save, value)) {
			refuse(vcpu, X86_TRAP_GP, true);
			return false;
		}
		save->efer = value | EFER_SVME;
		skip(vcpu, save->rip + 2);
	} else {
		answer(vcpu, save->efer & ~EFER_SVME);
	}
	return false;
}

/* Tells whether this is a port that is asked for by a register: INS and OUTS no kernel needs. */
static bool notrace do_io(struct basalt_vcpu *vcpu)
{
	u64 info = vcpu->vmcb->control.exit_info_1;
	u8 size = (info >> SVM_IOIO_SIZE_SHIFT) & 7;

	if (info & (SVM_IOIO_STR_MASK))
		return false;
	vcpu->run->io.port = info >> 16;
	vcpu->run->io.size = size;
	vcpu->run->io.write = !(info & SVM_IOIO_TYPE_MASK);
	vcpu->run->io.value = vcpu->vmcb->save.rax & (size == 4 ? U32_MAX : (1U << (8 * size)) - 1);
	skip(vcpu, vcpu->vmcb->control.exit_info_2);
	return true;
}

static bool notrace fail(struct basalt_vcpu *vcpu)
{
	count(vcpu, BASALT_COUNT_OTHER);
	vcpu->run->reason = BASALT_EXIT_FAILED;
	vcpu->run->failed.code = vcpu->vmcb->control.exit_code;
	vcpu->run->failed.info1 = vcpu->vmcb->control.exit_info_1;
	vcpu->run->failed.info2 = vcpu->vmcb->control.exit_info_2;
	return true;
}

/* A call. Tells whether it is user space's. */
static bool notrace do_hypercall(struct basalt_cpu *self, struct basalt_vcpu *vcpu)
{
	struct vmcb_save_area *save = &vcpu->vmcb->save;

	count(vcpu, BASALT_COUNT_HYPERCALL);
	skip(vcpu, save->rip + 3);
	vcpu->run->reason = BASALT_EXIT_HYPERCALL;
	if (save->rax != BASALT_CALL_ENTER)
		return true;
	save->rax = basalt_switch(self, vcpu);
	return false;
}

/**
 * basalt_svm_handle() - does what can be done here about the last exit
 * @self: what is known of this CPU
 * @vcpu: which has come out
 *
 * Return: whether user space is needed; then why is in the page.
 */
bool notrace basalt_svm_handle(struct basalt_cpu *self, struct basalt_vcpu *vcpu)
{
	struct vmcb_control_area *control = &vcpu->vmcb->control;

	switch (control->exit_code) {
	case SVM_EXIT_NMI:
		/* It was taken behind STGI: somebody wants the vCPU to look what it is to do. */
		count(vcpu, BASALT_COUNT_NMI);
		return false;
	case SVM_EXIT_IRET:
		/* It is executed next, so the next NMI may interrupt it: Linux's handler bears that. */
		count(vcpu, BASALT_COUNT_NMI);
		vcpu->in_nmi = false;
		control->intercepts[INTERCEPT_IRET / 32] &= ~BIT(INTERCEPT_IRET % 32);
		return false;
	case SVM_EXIT_CPUID:
		count(vcpu, BASALT_COUNT_CPUID);
		do_cpuid(vcpu);
		return false;
	case SVM_EXIT_MSR:
		vcpu->run->reason = BASALT_EXIT_MSR;
		return do_msr(vcpu);
	case SVM_EXIT_IOIO:
		count(vcpu, BASALT_COUNT_IO);
		vcpu->run->reason = BASALT_EXIT_IO;
		return do_io(vcpu) || fail(vcpu);
	case SVM_EXIT_NPF:
		count(vcpu, BASALT_COUNT_MEMORY);
		vcpu->run->reason = BASALT_EXIT_MEMORY;
		vcpu->run->memory.address = control->exit_info_2;
		vcpu->run->memory.error = control->exit_info_1;
		return true;
	case SVM_EXIT_VMMCALL:
		return do_hypercall(self, vcpu);
	case SVM_EXIT_SHUTDOWN:
		vcpu->run->reason = BASALT_EXIT_SHUTDOWN;
		return true;
	case SVM_EXIT_INVD:
	case SVM_EXIT_WBINVD:
		/* The caches are coherent, and others' too. */
		count(vcpu, BASALT_COUNT_OTHER);
		skip(vcpu, vcpu->vmcb->save.rip + 2);
		return false;
	case SVM_EXIT_VMRUN:
	case SVM_EXIT_VMLOAD:
	case SVM_EXIT_VMSAVE:
	case SVM_EXIT_STGI:
	case SVM_EXIT_CLGI:
	case SVM_EXIT_SKINIT:
	case SVM_EXIT_INVLPGA:
		count(vcpu, BASALT_COUNT_OTHER);
		refuse(vcpu, X86_TRAP_UD, false);
		return false;
	case SVM_EXIT_RDPMC:
		/* What they count is the host's as well. */
		count(vcpu, BASALT_COUNT_OTHER);
		refuse(vcpu, X86_TRAP_GP, true);
		return false;
	default:
		return fail(vcpu);
	}
}

/* An event that was on its way into the guest when it exited goes in with the next entry (15.7.2). */
static __always_inline void deliver_again(struct vmcb_control_area *control)
{
	u32 event = control->exit_int_info;

	control->event_inj = 0;
	if (!(event & SVM_EXITINTINFO_VALID))
		return;
	/* QEMU's TCG calls external interrupts exceptions. */
	if ((event & SVM_EXITINTINFO_TYPE_MASK) == SVM_EXITINTINFO_TYPE_EXEPT &&
	    (event & SVM_EXITINTINFO_VEC_MASK) >= FIRST_EXTERNAL_VECTOR)
		event &= ~SVM_EXITINTINFO_TYPE_MASK;
	control->event_inj = event;
	control->event_inj_err = control->exit_int_info_err;
}

/*
 * Has the guest get the NMI that is meant for it, if it is in none. If
 * something else is on its way already, an NMI to the CPU itself makes it exit
 * when that has arrived.
 */
static __always_inline void deliver_nmi(struct basalt_vcpu *vcpu)
{
	struct vmcb_control_area *control = &vcpu->vmcb->control;

	if (!READ_ONCE(vcpu->nmi) || vcpu->in_nmi)
		return;
	if (control->event_inj & SVM_EVTINJ_VALID) {
		__wrmsr(X2APIC(APIC_ICR), APIC_DM_NMI, vcpu->physical_id);
		return;
	}
	WRITE_ONCE(vcpu->nmi, false);
	vcpu->in_nmi = true;
	control->intercepts[INTERCEPT_IRET / 32] |= BIT(INTERCEPT_IRET % 32);
	control->event_inj = NMI_VECTOR | SVM_EVTINJ_TYPE_NMI | SVM_EVTINJ_VALID;
	control->event_inj_err = 0;
}

/**
 * basalt_svm_finish() - does what user space has answered
 * @vcpu: whose last exit it was about
 */
void notrace basalt_svm_finish(struct basalt_vcpu *vcpu)
{
	const struct basalt_run *run = vcpu->run;
	struct vmcb_save_area *save = &vcpu->vmcb->save;

	switch (vcpu->answer) {
	case BASALT_EXIT_IO:
		if (READ_ONCE(run->io.write))
			break;
		if (READ_ONCE(run->io.size) == 4)
			save->rax = run->io.value;
		else if (run->io.size == 2)
			save->rax = (save->rax & ~(u64)U16_MAX) | (u16)run->io.value;
		else
			save->rax = (save->rax & ~(u64)U8_MAX) | (u8)run->io.value;
		break;
	case BASALT_EXIT_MSR:
		if (READ_ONCE(run->msr.fault)) {
			fault(vcpu, X86_TRAP_GP, true);
			break;
		}
		if (READ_ONCE(run->msr.write))
			skip(vcpu, save->rip + 2);
		else
			answer(vcpu, READ_ONCE(run->msr.value));
		break;
	}
	vcpu->answer = BASALT_EXIT_INTERRUPTED;
}

static __always_inline void set_pat(u64 value)
{
	__wrmsr(MSR_IA32_CR_PAT, (u32)value, value >> 32);
}

/*
 * Into the guest and out again. With nested paging VMRUN gives the guest types
 * of memory of its own (15.25.2); without, what it reads and writes is the
 * CPU's register. The guest's first type, by which the host's memory is
 * accessed until Linux's are back, may be another than write-back: that is
 * slow, and coherent.
 */
static void notrace enter(struct basalt_cpu *self, struct basalt_vcpu *vcpu)
{
	struct vmcb_save_area *save = &vcpu->vmcb->save;

	if (!vcpu->vm->identity) {
		basalt_svm_enter(&vcpu->regs, vcpu->vmcb_pa, vcpu->host_pa);
		return;
	}
	if (save->g_pat != self->pat)
		set_pat(save->g_pat);
	basalt_svm_enter(&vcpu->regs, vcpu->vmcb_pa, vcpu->host_pa);
	save->g_pat = __rdmsr(MSR_IA32_CR_PAT);
	if (save->g_pat != self->pat)
		set_pat(self->pat);
}

/**
 * basalt_svm_step() - runs a guest until it exits
 * @self: what is known of this CPU
 * @vcpu: which; whoever wants something of it has been looked for behind a CLGI
 */
void notrace basalt_svm_step(struct basalt_cpu *self, struct basalt_vcpu *vcpu)
{
	if (READ_ONCE(vcpu->flush)) {
		WRITE_ONCE(vcpu->flush, false);
		vcpu->vmcb->control.tlb_ctl = TLB_CONTROL_FLUSH_ALL_ASID;
	}
	enter(self, vcpu);
	vcpu->vmcb->control.tlb_ctl = TLB_CONTROL_DO_NOTHING;
	deliver_again(&vcpu->vmcb->control);
}

/**
 * basalt_svm_run() - runs a vCPU until user space is needed, or somebody stops it; or does what else it is to
 * @self: what is known of this CPU
 * @vcpu: which
 */
void notrace basalt_svm_run(struct basalt_cpu *self, struct basalt_vcpu *vcpu)
{
	if (!vcpu->ran)
		begin(self, vcpu);
	switch (vcpu->job) {
	case BASALT_JOB_SAVE:
		basalt_fpu_save(self, vcpu->context);
		basalt_lapic_save(vcpu);
		return;
	case BASALT_JOB_LOAD:
		basalt_fpu_load(self, vcpu->context);
		basalt_lapic_load(vcpu);
		return;
	case BASALT_JOB_RUN:
		break;
	}
	basalt_svm_finish(vcpu);
	for (;;) {
		/* An NMI that comes behind the looks waits, and ends the guest's run as it begins. */
		asm volatile("clgi" : : : "memory");
		/* Somebody wants it, or the host ends. */
		if (READ_ONCE(vcpu->stop) || READ_ONCE(self->state) != BASALT_CPU_PARKED) {
			asm volatile("stgi" : : : "memory");
			vcpu->run->reason = BASALT_EXIT_INTERRUPTED;
			return;
		}
		deliver_nmi(vcpu);
		basalt_svm_step(self, vcpu);
		if (basalt_svm_handle(self, vcpu)) {
			vcpu->answer = vcpu->run->reason;
			return;
		}
	}
}
