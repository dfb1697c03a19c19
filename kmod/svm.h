/* SPDX-License-Identifier: GPL-2.0 */
/* What svm.c and svm_run.c have in common, and kernels' headers do not have. */
#ifndef _BASALT_SVM_H
#define _BASALT_SVM_H

#include <linux/types.h>

/* MSR_VM_CR, "SVMDIS". */
#ifndef SVM_VM_CR_SVM_DISABLE
#define SVM_VM_CR_SVM_DISABLE	4
#endif

struct basalt_regs;

/* enter.S */
void basalt_svm_enter(struct basalt_regs *regs, u64 vmcb, u64 host);

#endif
