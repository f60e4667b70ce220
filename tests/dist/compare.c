/* Relative L2 between two .npy files: compare A.npy B.npy BOUND. Exit status 0 when it is within the bound, with shapes
 * that agree. */
#include <apa/io.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
    apa_array a, b;
    char message[256] = "usage: compare A.npy B.npy BOUND";
    if (argc != 4 || apa_array_read(argv[1], &a, message, sizeof message) != APA_STATUS_OK ||
        apa_array_read(argv[2], &b, message, sizeof message) != APA_STATUS_OK) {
        fprintf(stderr, "%s\n", message);
        return 2;
    }
    double difference = 0, size = 0;
    const int agree = a.dims == b.dims && memcmp(a.shape, b.shape, sizeof a.shape) == 0;
    for (int64_t i = 0; i < a.elements && agree; i++) {
        double x = 0, y = 0;
        apa_array_get_f64(&a, i, 1, &x);
        apa_array_get_f64(&b, i, 1, &y);
        if (!(x == y)) /* equal infinities too */
            difference += (x - y) * (x - y);
        size += isfinite(y) ? y * y : 0;
    }
    const double error = sqrt(difference / size);
    printf("%s, %s: relative L2 %.3g, expected at most %s\n", argv[1], argv[2], error, argv[3]);
    apa_array_free(&a);
    apa_array_free(&b);
    return agree && error <= atof(argv[3]) ? 0 : 1;
}
