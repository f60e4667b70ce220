/* Kernels of the portable level in a file of their own. */
#ifndef APA_CPU_SCALAR_BEND_H
#define APA_CPU_SCALAR_BEND_H

void apa_bend_scalar(float *s, int n, const float *factor, float cap, const float *slope, const float *distance,
                     const float *bias);
void apa_into_lanes_scalar(const float *rows, float *lanes);

#endif
