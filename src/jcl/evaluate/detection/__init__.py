"""Transfer of a backbone to COCO: object detection, instance segmentation and key points, as the paper's Table 2."""
